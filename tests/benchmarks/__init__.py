"""How fast raytrain is beside what it is measured against, on this machine, in one go:

    uv run python -m tests.benchmarks --data DIR [ingest packed step startup memory plan]

``DIR`` holds CIFAR-10 as ``train/<class>/*.jpg``; a local S3 server serves it. The figures are printed and written to
``runs/benchmarks.json``. On two cores that nothing else uses it takes some 45 minutes; ``--scale 0.02`` tries it out.
"""
