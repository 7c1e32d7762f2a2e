"""New weights beside the running model: only those that fit are let through."""

from __future__ import annotations

import pytest
from attrs import evolve
from hypothesis import assume, given
from hypothesis import strategies as st

from protocol.errors import BadRequest
from protocol.model_weights import Checkpoint, Form, check_checkpoint, check_forms

FORMS = st.builds(Form, st.sampled_from(["F32", "BF16"]), st.lists(st.integers(0, 9), max_size=3).map(tuple))
INDEX = st.dictionaries(st.text(min_size=1, max_size=8), FORMS, min_size=1, max_size=6)
CONFIGURATION = {"architectures": ["Oak"], "hidden_size": 8, "torch_dtype": "bfloat16"}


@given(INDEX, st.data())
def test_any_part_of_a_model_fits_it(index: dict[str, Form], data: st.DataObject) -> None:
    names = data.draw(st.sets(st.sampled_from(sorted(index))))
    check_forms(index, {name: index[name] for name in names})
    check_checkpoint(Checkpoint(CONFIGURATION, index), Checkpoint(CONFIGURATION, dict(reversed(index.items()))))


@given(INDEX, INDEX)
def test_nothing_else_fits_it(index: dict[str, Form], given_forms: dict[str, Form]) -> None:
    assume(any(index.get(name) != form for name, form in given_forms.items()))
    with pytest.raises(BadRequest, match="do not fit the running model"):
        check_forms(index, given_forms)


@given(INDEX, st.data())
def test_a_checkpoint_has_every_tensor(index: dict[str, Form], data: st.DataObject) -> None:
    gone = data.draw(st.sampled_from(sorted(index)))
    part = {name: form for name, form in index.items() if name != gone}
    with pytest.raises(BadRequest, match="is missing"):
        check_checkpoint(Checkpoint(CONFIGURATION, index), Checkpoint(CONFIGURATION, part))


def test_each_mistake_is_named_and_not_too_many() -> None:
    index = {"a": Form("F32", (2,)), "b": Form("F32", (2,))}
    wrong = {"a": Form("BF16", (2,)), "b": Form("F32", (3,)), **{f"x{number}": Form("F32", ()) for number in range(9)}}
    with pytest.raises(BadRequest) as caught:
        check_forms(index, wrong)
    assert caught.value.detail == (
        "the weights do not fit the running model: a is BF16 [2], and F32 [2] in the model; b is F32 [3], and F32 [2]"
        " in the model; x0 is no tensor of the model; x1 is no tensor of the model; and 7 more"
    )


def test_a_configuration_is_of_the_same_model_but_for_what_computes_nothing() -> None:
    running = Checkpoint(CONFIGURATION, {"a": Form("F32", ())})
    check_checkpoint(running, evolve(running, config={**CONFIGURATION, "torch_dtype": "float32", "use_cache": False}))
    for config in ({**CONFIGURATION, "hidden_size": 9}, {"architectures": ["Oak"]}, {**CONFIGURATION, "rope_theta": 1}):
        with pytest.raises(BadRequest, match=r"^config\.json is of another model: "):
            check_checkpoint(running, evolve(running, config=config))
