"""Notes of the watch of a loop: what makes its result depend on the number of workers, and what to write instead."""

from __future__ import annotations

NOTES_ON_LOSSES = {
    "sum": (
        "the loss is a sum over images, and a run of several workers takes it for a mean: let it be a mean "
        '(reduction="mean"), as in a loop for one GPU'
    ),
    "other mean": (
        "the loss is a mean over something else than images, such as the weights of their classes or those that a mask "
        "or ignore_index leaves, so it depends on the number of workers; write run.mean(sum, divisor), in "
        "docs/your-own-loop.md"
    ),
    "compares": (
        "the loss compares the images of a worker with each other (by a statistic over them, by products of their "
        "features, or by rows in another order), so it depends on the number of workers; take the rows of all workers, "
        "run.gather(rows), in docs/your-own-loop.md"
    ),
    "scaled": (
        "the loss depends on the size of gradients for images, or for what is computed of them, and these are those of "
        "a mean over one worker's images: the fewer images it has, the larger they are; take those of a sum, as in "
        "torch.autograd.grad(losses.sum(), images), divided by run.total([batch.num_used])[0]"
    ),
    "gathered": (
        "the loss depends on a gradient of torch.autograd.grad that passes run.gather, and is that of one worker's "
        "rows: gather what the network gets, as in run.gather(batch.images), so that each worker has all images"
    ),
    "kept": (
        "the loss depends on a tensor of a step before, which was computed from one worker's images, so it depends on "
        "the number of workers; compute it from run.gather(rows) or run.total(sums), or keep it in a network's buffer; "
        "of losses that are added up, call the backward of each in its own step"
    ),
    "late": (
        "the loop computes with a batch after it has asked for the next one: that one's images weight its gradients "
        "and metrics, and a resume leaves a batch out; compute with each batch before asking for the next one, as a "
        "run reads images ahead by itself"
    ),
    "placed": (
        "the loss treats images by their places among those of a worker, such as its first half, so it depends on the "
        "number of workers; choose them by batch.samples, as in batch.samples % 2 == 0, and give a network with batch "
        "norm all of them at once, or those of batch.microbatches()"
    ),
}
"""By a mark of the loss, of :mod:`raytrain.training.loop_checks.watched_calls`."""

HOOK = (
    "a hook of a tensor gets the gradient of the mean over one worker's images, as in DistributedDataParallel, and "
    "changes it otherwise than by a factor, so it depends on the number of workers; change parameter.grad after "
    "backward(), or use register_post_accumulate_grad_hook, which gets the gradient of the global batch"
)
GRADIENTS = (
    "the loop reads gradients of weights between the backwards of single images, and these are of one image of each "
    "worker together, so that it depends on the number of workers; take those of one image from torch.autograd.grad, "
    "and weight its loss by what they give, as in (factors * losses).mean()"
)
GENERATOR = (
    "the loop or a network draws random numbers from a generator of its own, the same on each worker for other "
    "images, so that the run depends on the number of workers; draw for each image by its number in batch.samples, "
    "or train on one worker"
)
NUMBERS = (
    "the loss depends on numbers that differ between the workers ({line}), each of which computes them from its own "
    "images, so that it depends on the number of workers; compute them from run.total(...) or run.gather(...)"
)
DRAWS = (
    "the loop or its network draws random numbers from {names}: each worker draws its own, so that the run depends on "
    "the number of workers; docs/images.md names the layers with which it does not"
)
LAYERS = (
    "the workers differ in {names}, which a network computes from one worker's images: keep it in a buffer, computed "
    "with run.total or run.gather"
)
