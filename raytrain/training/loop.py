"""The built-in training loop. Copy it into a file of your own and change what you like: nothing here is special."""

from __future__ import annotations

import torch
from torch.nn.utils import clip_grad_norm_

from raytrain.training.networks.weight_average import WeightAverage
from raytrain.training.run import Run


def train(run: Run) -> None:
    """Train ``run.config.model`` on the run's images."""
    model = run.prepare(run.build_model())
    optimizer = run.prepare(run.build_optimizer(model))
    scheduler = run.prepare(run.build_scheduler(optimizer))
    scaler = run.prepare(torch.amp.GradScaler(run.device.type, enabled=run.config.precision == "float16"))
    decay = run.config.ema_decay
    average = None if decay is None else run.prepare(WeightAverage(model, decay))
    for epoch in run.epochs():  # after a resume, the first one may be the rest of an epoch
        run.train_head_first(model, epoch)  # does nothing without --head-epochs
        for batch in epoch:
            optimizer.zero_grad()
            for microbatch in batch.microbatches():  # one, unless --accumulate asks for more
                logits = model(microbatch.images)  # (m, C)
                loss = run.loss(logits, microbatch.targets)  # the mean; cross entropy if no option says else
                with run.no_sync(not microbatch.is_last):  # the last backward sums the gradients of them all
                    scaler.scale(loss).backward()  # afterwards they are those of the whole global batch
                run.log(loss=loss, accuracy=run.accuracy(logits, microbatch))
                run.show(microbatch, logits)  # to whoever watches
            scaler.unscale_(optimizer)
            if run.config.clip_norm is not None:
                clip_grad_norm_(model.parameters(), run.config.clip_norm)
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            if average is not None:
                average.update(batch.step)
