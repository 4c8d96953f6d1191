"""The built-in training loop. Copy it into a file of your own and change what you like: nothing here is special."""

from __future__ import annotations

from raytrain.training.run import Run


def train(run: Run) -> None:
    """Train ``run.config.model`` on the run's images."""
    model = run.prepare(run.build_model())
    optimizer = run.prepare(run.build_optimizer(model))
    for batch in run.batches():  # ends after the same step on every worker, also after a stop request
        for part in run.parts(batch):  # one part, unless --accumulate asks for more
            logits = model(part.images)  # (m, C)
            loss = run.loss(logits, part.targets)  # the sum over the images; cross entropy if no option says else
            run.backward(loss)  # divides by the number of used images in the whole global batch
            run.log(loss=loss, correct=run.correct(logits, part))
            run.show(part, logits)  # to whoever watches
        run.step(optimizer)
