"""Every step has all that the trainer asks of one."""

import inspect

import pytest

from common.xtts.dims import SIZES
from tests.support.arithmetic_step import ArithmeticStep
from trainer.step.contract import SharedStep, Step, StepOptions
from trainer.step.dvae import DvaeStep
from trainer.step.gpt import GptStep

STEPS = {
    "arithmetic": ArithmeticStep,
    "dvae": lambda: DvaeStep(SIZES["tiny"], StepOptions(init_seed=None), []),
    "gpt": lambda: GptStep(SIZES["tiny"], StepOptions(init_seed=None), []),
}
CALLS = {
    name: f for name, f in vars(Step).items() if inspect.isfunction(f) and not name.startswith("_")
}


@pytest.mark.parametrize("make", STEPS.values(), ids=STEPS)
def test_a_step_keeps_the_contract(make):
    step = make()
    for name in Step.__annotations__:
        assert hasattr(step, name), name
    for name, asked in CALLS.items():
        given, wanted = (
            list(inspect.signature(f).parameters) for f in (getattr(step, name), asked)
        )
        assert given == wanted[1:], name


@pytest.mark.parametrize("kind", ["arithmetic", "gpt"])
def test_stage_2_can_be_shared(kind):
    step = STEPS[kind]()
    for name in ("share", "digests"):
        given = list(inspect.signature(getattr(step, name)).parameters)
        assert given == list(inspect.signature(getattr(SharedStep, name)).parameters)[1:]


def test_the_contract_is_what_the_trainer_uses():
    assert set(CALLS) == {
        *("micro", "apply", "update", "evaluate", "read"),
        *("dry_run", "dry_evaluate", "programs"),
        *("state_dict", "snapshot", "load_state_dict"),
    }
    assert set(Step.__annotations__) == {"compiles", "dims", "model", "options", "trace_counts"}
    assert not hasattr(ArithmeticStep(), "no_such_member")
