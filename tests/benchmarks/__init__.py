"""Compare the speed and memory of raytrain with its references on this machine:

    uv run --group dev python -m tests.benchmarks --data DIR [ingest packed step startup memory plan watch]

``DIR`` holds CIFAR-10 as ``train/<class>/*.jpg``; a local S3 server serves it. The results are printed and written to
``runs/benchmarks.json``. All benchmarks take about 45 minutes on two idle cores; use ``--scale 0.02`` for a quick try.
"""
