import pytest
import torch
from transformers import PretrainedConfig

from autosac.step.training_step import default_loss, normalize_inputs
from benchmarks.models import drawn
from benchmarks.models.drawn import configs, of_transformers


@pytest.mark.parametrize("library", drawn.LIBRARIES)
def test_names_are_drawn_by_number_each_once_and_not_the_zoo_s(library):
    names = drawn.drawn(library)

    assert names == drawn.drawn(library)
    assert sorted(names) != names != drawn.drawn(library, seed=17)
    assert len(set(names)) == len(names) > 60
    assert all(name.startswith(f"{library}/") for name in names)
    zoo = {"transformers/gpt2", "timm/convnext_atto", "torchvision/resnet18"}
    assert not zoo & set(names)


def test_one_model_of_each_family_of_timm_is_drawn():
    names = [name.removeprefix("timm/") for name in drawn.drawn("timm")]

    from timm.models import _registry  # the families are those of the registry

    families = [_registry._model_to_module[name] for name in names]
    assert len(set(families)) == len(families)


def every_config(config):
    yield config
    for value in vars(config).values():
        if isinstance(value, PretrainedConfig):
            yield from every_config(value)


def test_a_shrunken_config_is_small_in_every_part():
    config = configs.shrunken("llava", "SIZES")

    parts = list(every_config(config))
    assert len(parts) == 3  # the whole, its language model and its eyes
    for part in parts[1:]:
        assert part.num_hidden_layers == configs.LAYERS
        assert part.hidden_size == 64
        assert part.hidden_size % part.num_attention_heads == 0
    assert config.text_config.vocab_size == configs.VOCABULARY
    assert config.image_token_id < configs.FIRST_WORD  # 32000 by default
    assert config.text_config.use_cache is False


def test_a_share_of_a_width_keeps_the_heads():
    config = configs.shrunken("llama", "SHARES")

    assert config.num_attention_heads == 32
    assert config.hidden_size == 4096 // 4
    assert config.intermediate_size == 11008 // 4
    assert config.head_dim == 128 // 4
    assert configs.shrunken("llama", "LAYERS").hidden_size == 4096


def test_stages_keep_their_number_and_lose_layers():
    config = configs.shrunken("swinv2", "SIZES")

    assert list(config.depths) == [2, 2, 2, 2]  # of 2, 2, 6, 2


@pytest.mark.slow_but_first
@pytest.mark.parametrize(
    "name",
    ["transformers/opt", "transformers/bart", "transformers/poolformer", "timm/ghostnet"
     "_050", "torchvision/googlenet"],
)  # fmt: skip
def test_a_drawn_model_trains(name, one_thread):
    work = drawn.build(name, num_images=2)

    model = work.make_model()
    args, kwargs = normalize_inputs(work.make_inputs())
    loss = (work.loss_fn or default_loss)(model(*args, **kwargs))
    loss.backward()

    assert model.training and loss.ndim == 0
    assert any(parameter.grad is not None for parameter in model.parameters())
    again = work.make_inputs()
    assert all(map(torch.equal, *(normalize_inputs(i)[0] for i in (args, again))))


def test_detection_gets_images_and_targets():
    images, targets = drawn.build("torchvision/fcos_resnet50_fpn").make_inputs()

    assert len(images) == len(targets) == 8
    assert targets[0]["boxes"].shape == (2, 4)


@pytest.mark.slow
def test_what_cannot_be_built_says_what_was_tried(monkeypatch):
    monkeypatch.setattr(of_transformers, "batches", lambda *_: iter([{}]))

    with pytest.raises(drawn.NotBuiltError, match=r"SIZES: .*; SHARES: .*; LAYERS: "):
        drawn.build("transformers/opt")
    with pytest.raises(drawn.NotBuiltError, match="no_such_model"):
        drawn.build("torchvision/no_such_model")
    with pytest.raises(drawn.NotBuiltError, match="no_such_model"):
        drawn.build("transformers/no_such_model")
