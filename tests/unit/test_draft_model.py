"""A draft model that does not fit is refused before anything is loaded; auto's rule for who drafts."""

import pytest

from rapid_sgl.config import RapidConfig
from rapid_sgl.drafter.choice import Abilities, choose
from rapid_sgl.drafter.draft_model import check_draft_model
from rapid_sgl.models import embedded_model_path
from rapid_sgl.request import RequestOptions
from rapid_sgl.retrieval.embedding import embedded_embedder_path


def test_own_tokenizer_is_accepted():
    check_draft_model(str(embedded_model_path()), str(embedded_model_path()))


def test_another_vocabulary():
    with pytest.raises(
        ValueError, match=r"vocabulary \(30522 tokens\) is not the target's \(49152\).*same family"
    ):
        check_draft_model(str(embedded_embedder_path()), str(embedded_model_path()))


def test_missing_folder_and_folder_without_a_model(tmp_path):
    with pytest.raises(ValueError, match="there is no such folder"):
        check_draft_model(str(tmp_path / "gone"), str(embedded_model_path()))
    with pytest.raises(ValueError, match="tokenizer, which must be the target's, cannot be loaded"):
        check_draft_model(str(tmp_path), str(embedded_model_path()))


FULL = Abilities(reencode=True)


@pytest.mark.parametrize(
    ("config", "abilities", "chosen"),
    [
        ({"drafter": "off"}, FULL, ("off", "requested")),
        ({"drafter": "view"}, FULL, ("view", "requested")),
        ({"drafter": "view"}, Abilities(no_views="mrope"), ("off", "mrope")),
        ({"drafter": "rag"}, FULL, ("rag", "requested")),
        ({"drafter": "rag"}, Abilities(), ("off", "no_draft_memory")),
        ({"drafter": "rag", "budget": 9000}, FULL, ("off", "short_prompt")),
        ({"drafter": "auto"}, FULL, ("view", "cheapest")),
        ({"drafter": "auto", "transfer": "mixture"}, FULL, ("rag", "transfer")),
        ({"drafter": "auto", "transfer": "mixture"}, Abilities(), ("view", "cheapest")),
        ({"drafter": "auto"}, Abilities(reencode=True, draft_model=True), ("rag", "draft_model")),
        ({"drafter": "auto"}, Abilities(reencode=True, no_views="mrope"), ("rag", "mrope")),
        ({"drafter": "auto"}, Abilities(no_views="mrope"), ("off", "mrope")),
    ],
)
def test_choice(config, abilities, chosen):
    options = RequestOptions(RapidConfig(**config))
    assert choose(options, 4000, abilities, lora=False) == chosen
    assert choose(options, 4000, abilities, lora=True)[0] == "off"


def test_a_draft_prompt_is_used_whatever_the_prompts_length():
    options = RequestOptions(RapidConfig(drafter="auto"), draft_ids=(1, 2))
    assert choose(options, 10, FULL, lora=False) == ("rag", "draft_prompt")
