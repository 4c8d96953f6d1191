"""What fails in passing is repeated, with pauses that grow and differ, and counted; anything else is raised at once."""

from __future__ import annotations

import pytest
from obstore.exceptions import GenericError, PermissionDeniedError

from raytrain.storage import retry
from raytrain.storage.retry import HASTY, PATIENT, Patience, num_retries, repeat

BUSY = GenericError("Error performing GET - Server returned non-2xx status code: 503 Service Unavailable: <Code>SlowDown</Code>")


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Pauses that are noted instead of waited for."""
    noted: list[float] = []
    monkeypatch.setattr(retry.time, "sleep", noted.append)
    return noted


class Fails:
    def __init__(self, times: int, error: Exception = BUSY) -> None:
        self.times, self.error = times, error

    def __call__(self) -> str:
        self.times -= 1
        if self.times >= 0:
            raise self.error
        return "done"


def test_repeats_are_counted_and_their_pauses_grow_and_differ(pauses: list[float]) -> None:
    before = num_retries()
    assert [repeat(Fails(12), PATIENT) for _ in range(50)] == ["done"] * 50
    assert num_retries() - before == 50 * 12
    by_attempt = [pauses[attempt::12] for attempt in range(12)]
    assert all(max(some) <= min(15.0, 0.1 * 2**attempt) for attempt, some in enumerate(by_attempt))
    means = [sum(some) / 50 for some in by_attempt]
    assert means[0] < 0.1 < means[4] < means[7] and means[-1] > 5
    assert len(set(by_attempt[-1])) == 50


@pytest.mark.parametrize("patience", [HASTY, Patience(7, 60.0)])
def test_patience_ends(patience: Patience, pauses: list[float]) -> None:
    with pytest.raises(GenericError):
        repeat(Fails(1000), patience)
    assert len(pauses) == patience.max_repeats


@pytest.mark.parametrize("error", [PermissionDeniedError("status code: 403 Forbidden"), FileNotFoundError("a"), OSError(28, "full")])
def test_what_will_not_pass_is_raised_at_once(error: Exception, pauses: list[float]) -> None:
    with pytest.raises(type(error)):
        repeat(Fails(1, error), PATIENT)
    assert not pauses
