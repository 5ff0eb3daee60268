"""Many more random lives of cache and engine, other ones in every run."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

from tests.property.test_cache import CacheMachine, CollidingMachine
from tests.property.test_engine import EngineMachine

LONG = settings(
    max_examples=2000, stateful_step_count=70, deadline=None, derandomize=False, print_blob=True
)


@pytest.mark.long
@pytest.mark.parametrize("machine", [CacheMachine, CollidingMachine, EngineMachine])
def test_many_random_lives(machine: type[RuleBasedStateMachine]) -> None:
    run_state_machine_as_test(machine, settings=LONG)
