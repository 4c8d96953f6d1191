"""The scripts of docs/reader.md run as they stand, and Lightning goes on in the middle of an epoch."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.helpers.gloo_processes import run_script
from tests.helpers.scripts import run

PAGE = Path(__file__).parents[2] / "docs" / "reader.md"
SCRIPTS: dict[str, str] = dict(re.findall(r"```python title=\"(.*?)\"\n(.*?)```", PAGE.read_text(), re.DOTALL))
BIN = Path(sys.executable).parent


@pytest.fixture
def folder(images: Path, tmp_path: Path) -> Path:
    """A folder with the scripts of the page, and the photographs that they read."""
    (tmp_path / "photos").symlink_to(images)
    for name, script in SCRIPTS.items():
        assert len(script.splitlines()) <= 30
        (tmp_path / name).write_text(script)
    return tmp_path


@pytest.mark.slow
def test_one_process_trains_and_measures(folder: Path) -> None:
    assert re.search(r"epoch 1: accuracy \d\.\d\d", run(folder, sys.executable, "plain.py"))


def test_two_processes_of_torchrun_train(folder: Path) -> None:
    assert re.search(r"epoch 1: loss \d+\.\d\d", run_script(folder / "distributed.py", 2))


@pytest.mark.slow
def test_torchrun_itself_trains_on_two_processes(folder: Path) -> None:
    printed = run(folder, BIN / "torchrun", "--nproc-per-node", "2", "distributed.py")
    assert re.search(r"epoch 1: loss \d+\.\d\d", printed)


@pytest.mark.slow
def test_accelerate_trains_and_saves_the_state_of_the_loader(folder: Path) -> None:
    assert "epoch 1: loss" in run(folder, sys.executable, "with_accelerate.py")
    assert (folder / "checkpoint" / "custom_checkpoint_0.pkl").exists()


@pytest.mark.slow
def test_ray_train_trains_on_two_workers(folder: Path) -> None:
    run(folder, sys.executable, "with_ray_train.py")


_RESUMES = """
source = open("with_lightning.py").read().partition("loader = ")[0]
exec(source)
samples = []

class Noted(Classifier):
    def training_step(self, batch, batch_idx):
        samples.extend(batch.samples.tolist())
        return super().training_step(batch, batch_idx)

def fit(ckpt_path=None, **limit):
    loader = raytrain.ImageLoader("photos", batch_size=20, image_size=64)
    save = lightning.pytorch.callbacks.ModelCheckpoint(".", filename="middle", every_n_train_steps=2)
    trainer = lightning.Trainer(logger=False, enable_progress_bar=False, callbacks=[save], max_epochs=1, **limit)
    trainer.fit(Noted(3), loader, ckpt_path=ckpt_path)
    return trainer, len(loader), loader.num_images

fit(max_steps=3)
del samples[40:]  # they came after the checkpoint
trainer, num_steps, num_images = fit("middle.ckpt")
assert trainer.global_step == num_steps, trainer.global_step
assert sorted(samples) == list(range(num_images)), sorted(samples)
print("each sample once")
"""


@pytest.mark.slow
def test_lightning_resumes_in_the_middle_of_an_epoch_with_each_sample_once(folder: Path) -> None:
    (folder / "resumes.py").write_text(_RESUMES)
    assert "each sample once" in run(folder, sys.executable, "resumes.py")
