"""What ``import raytrain`` gives: ``__init__.py`` imports these names lazily, and type checkers read them here."""

from . import recipes as recipes
from .config import TrainConfig as TrainConfig
from .data.table_file import history as history
from .datasets.pack import pack as pack
from .diagnostics.audit import audit as audit
from .diagnostics.profile import profile as profile
from .display.find_rate import find_rate as find_rate
from .display.look import look as look
from .display.sweep import sweep as sweep
from .display.train import start as start
from .display.train import train as train
from .errors import RaytrainError as RaytrainError
from .errors import StorageError as StorageError
from .errors import TrainingFailed as TrainingFailed
from .errors import UsageError as UsageError
from .experiments.compare import compare as compare
from .experiments.sweep_result import SweepResult as SweepResult
from .experiments.track import track as track
from .inference.classifier import Classifier as Classifier
from .inference.classifier import load as load
from .inference.evaluate import evaluate as evaluate
from .inference.export import export as export
from .inference.predict import predict as predict
from .inference.serve import serve as serve
from .launch.attach import attach as attach
from .launch.train import RunHandle as RunHandle
from .launch.train import stop as stop
from .loader.image_loader import ImageLoader as ImageLoader
from .runs.outcome import TrainResult as TrainResult
from .storage.filesystem import filesystem as filesystem
from .trackers.tracker import Tracker as Tracker
from .training.batches.augmentation import Augmentation as Augmentation
from .training.batches.batch import Batch as Batch
from .training.batches.batch import Epoch as Epoch
from .training.exact.data_parallel import no_sync as no_sync
from .training.exact.data_parallel import parallel as parallel
from .training.networks.weight_average import WeightAverage as WeightAverage
from .training.run import Run as Run

__all__: list[str]
