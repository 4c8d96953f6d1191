"""The built-in training loop. Copy it into a file of your own and change what you like: nothing here is special."""

from __future__ import annotations

import torch.nn.functional as F

from raytrain.training.run import Run


def train(run: Run) -> None:
    """Train ``run.config.model`` on the run's images by cross entropy."""
    model = run.prepare(run.build_model())
    optimizer = run.prepare(run.build_optimizer(model))
    for batch in run.batches():  # ends after the same step on every worker, also after a stop request
        for part in run.parts(batch):  # one part, unless --accumulate asks for more
            logits = model(part.images)  # (m, C)
            loss = F.cross_entropy(logits, part.targets, reduction="sum", label_smoothing=run.config.label_smoothing)
            run.backward(loss)  # divides by the number of used images in the whole global batch
            run.log(loss=loss, correct=(logits.argmax(dim=1) == part.labels).sum())
            run.show(part, logits)  # to whoever watches
        run.step(optimizer)
