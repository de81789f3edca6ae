"""A model on the meta device, from a Transformers directory or from a function."""

from __future__ import annotations

import fnmatch
import inspect
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.config.schema import Model
from shardwright.errors import ModelError, did_you_mean
from shardwright.layout.import_path import import_object, is_import_path
from shardwright.models.hub_names import hub_names
from shardwright.models.initialization import META, Recipe, Recorder, UnsplitModel, assign_owners, view_of
from shardwright.models.model_config import model_directory as model_directory
from shardwright.models.model_config import read_config as read_config
from shardwright.models.model_parts import beside_text, tied_names
from shardwright.models.weights import read_headers
from shardwright.torch_private import own_buffers, own_parameters, storage_id

RECIPES = "_shardwright_recipes"  # attribute of each module: {name of its parameter, buffer or tensor: Recipe}
# Written by old versions of Transformers; now computed, or not used at all.
_IGNORED_WEIGHTS = (r"rotary_emb\.inv_freq$", r"\.attn\.(masked_)?bias$", r"(^|\.)position_ids$")


def build_model(spec: Model, dtype: torch.dtype) -> nn.Module:
    """The model of `spec` on the meta device: no memory, ties tied, caches off, frozen as asked.

    Floating-point parameters are contiguous and have `dtype`. Buffers keep the dtype of a model built in
    float32: rotary tables and scales do not follow `dtype`. `materialise` gives everything its value.

    Raises `ModelError` for what cannot be built: no such directory or function, no weights for `init:
    pretrained`, an override that is no key of the config, a freeze pattern that matches nothing.
    """
    recorder = Recorder()
    if is_import_path(spec.model_name_or_path):
        model = _from_function(spec, recorder)
    else:
        model = _from_directory(spec, recorder)
    _check_on_meta(model)
    _attach_recipes(model, recorder)
    _convert_parameters(model, dtype)
    _freeze(model, [*spec.freeze, *beside_text(model)])
    if dtype == torch.float64:
        _without_grouped_products(model)
    if hasattr(model, "config") and hasattr(model.config, "use_cache"):
        model.config.use_cache = False
        model.config.dtype = dtype
    return model


def _without_grouped_products(model: Any) -> None:
    """Experts one by one, where the model has any: grouped products know no float64."""
    if hasattr(model, "set_experts_implementation") and model._can_set_experts_implementation():
        model.set_experts_implementation("eager")


def quiet_transformers() -> None:
    """Silences Transformers' advice to pass an attention mask: rows are padded on the right, where no target looks."""
    from transformers.utils import logging

    logging.set_verbosity_error()


def _from_directory(spec: Model, recorder: Recorder) -> nn.Module:
    if spec.kwargs:
        raise ModelError(
            "model.kwargs has no effect on a Transformers directory.", "", "Use model.config_overrides, or remove it."
        )
    config = read_config(spec)
    if spec.init == "pretrained":
        read_headers(model_directory(spec))
    if getattr(config, "output_router_logits", False):
        raise ModelError(
            f"{config.model_type} asks for the auxiliary loss of its routers (output_router_logits).",
            "This loss is a mean over the tokens of one forward, so microbatches and layouts would change the objective.",
            "Set output_router_logits to false in config.json or model.config_overrides.",
        )
    kind = _model_kind(config)
    try:
        return _recorded(kind, config, spec.attn_implementation, recorder)
    except (ValueError, ImportError) as error:
        if spec.attn_implementation == "eager" or "attention" not in str(error):
            raise ModelError(
                f"{config.model_type} cannot be built: {str(error).splitlines()[0]}",
                "",
                "Check config.json and model.config_overrides.",
            ) from error
    # eager is what every family has; whoever leaves attention as it is refuses that (`check_own_attention`)
    return _recorded(kind, config, "eager", recorder)


def _recorded(kind: Any, config: Any, attention: str, recorder: Recorder) -> nn.Module:
    with recorder:
        model: nn.Module = kind.from_config(config, dtype=torch.float32, attn_implementation=attention)
        _run_transformers_rules(model)
    return model


def check_own_attention(model: nn.Module, spec: Model) -> None:
    """Raises `ModelError` where `model`, which keeps its own core attention, does not have the one that `spec` asks for."""
    built = getattr(getattr(model, "config", None), "_attn_implementation", None)
    if not is_import_path(spec.model_name_or_path) and built != spec.attn_implementation:
        raise ModelError(
            f"{type(model).__name__} cannot use model.attn_implementation {spec.attn_implementation}.",
            "The attention of this model needs a feature that the implementation lacks, for example caps on scores.",
            f"Set model.attn_implementation to {built}.",
        )


def _model_kind(config: Any) -> Any:
    """What of Transformers builds a model from `config` that reads and writes text, also where it may read images too."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    if type(config) in AutoModelForCausalLM._model_mapping:
        return AutoModelForCausalLM
    if type(config) in AutoModelForImageTextToText._model_mapping and not getattr(config, "is_encoder_decoder", False):
        found = AutoModelForImageTextToText._model_mapping[type(config)]
        images = inspect.signature(found.forward).parameters.get("pixel_values")
        if found.__name__.endswith("ForConditionalGeneration") and (
            images is None or images.default is None
        ):  # text alone will do
            return AutoModelForImageTextToText
    raise ModelError(
        f"{config.model_type} has no causal language model in Transformers.",
        "",
        "Take the config of its text model, or give a function as package.module:function.",
    )


def _run_transformers_rules(model: Any) -> None:
    """Transformers skips its initialisation on meta; this runs it, in its order: first values, then ties.

    Tied names get a tensor of their own for the time, as in a normal build: otherwise the rule of the head
    would overwrite what the rule of the embedding gave, a row of zeros for the padding token for example.
    """
    for name in model.all_tied_weights_keys:
        parent, _, leaf = name.rpartition(".")
        owner = model.get_submodule(parent)
        setattr(owner, leaf, nn.Parameter(torch.empty_like(getattr(owner, leaf), device=META)))
    model.initialize_weights()
    model.tie_weights(recompute_mapping=False)


def _from_function(spec: Model, recorder: Recorder) -> nn.Module:
    if spec.init == "pretrained":
        raise ModelError(
            f"model.init is pretrained, but {spec.model_name_or_path} is a function, which has no weights.",
            "",
            "Set model.init to random, or give a Transformers directory.",
        )
    if spec.config_overrides:
        raise ModelError("model.config_overrides has no effect on a function.", "", "Use model.kwargs, or remove it.")
    function = import_object(spec.model_name_or_path, "model.model_name_or_path")
    _check_arguments(function, spec)
    try:
        with recorder:
            model = function(**spec.kwargs)
            if hasattr(model, "all_tied_weights_keys"):
                _run_transformers_rules(model)
    except Exception as error:
        raise ModelError(
            f"{spec.model_name_or_path} failed on the meta device: {type(error).__name__}: {error}",
            "The model is first built on the meta device, so that each rank allocates only its part.",
            "Tensors have no values then: where the constructor reads one (.item(), .tolist(), if), compute "
            "with Python numbers, and give no explicit device.",
        ) from error
    if not isinstance(model, nn.Module):
        raise ModelError(f"{spec.model_name_or_path} returned {type(model).__name__}.", "", "Return an nn.Module.")
    return model


def _check_arguments(function: Any, spec: Model) -> None:
    try:
        inspect.signature(function).bind(**spec.kwargs)
    except TypeError as error:
        raise ModelError(
            f"model.kwargs do not fit {spec.model_name_or_path}{inspect.signature(function)}: {error}."
        ) from None


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Every tensor that `module` itself holds: parameters, buffers, and tensors kept as plain attributes."""
    plain = {name: value for name, value in vars(module).items() if isinstance(value, Tensor)}
    held = {**own_parameters(module), **own_buffers(module), **plain}
    return {name: value for name, value in held.items() if value is not None}


def _check_on_meta(model: nn.Module) -> None:
    """Refuses parameters with real memory, and two parameters that are views of one storage."""
    names: dict[int, str] = {}
    for name, parameter in model.named_parameters():
        if not parameter.is_meta:
            raise ModelError(
                f"{name} was built on {parameter.device}.",
                "Its value would differ between ranks or take the memory of the whole.",
                "Create it without an explicit device and not from numpy.",
            )
        storage = storage_id(parameter)
        if storage in names:
            raise ModelError(
                f"{name} and {names[storage]} are two parameters that share memory.",
                "Sharding would separate them.",
                "Assign the same nn.Parameter to both to tie them, or clone one.",
            )
        names[storage] = name
    if not names:
        raise ModelError(f"{type(model).__name__} has no parameters.")


def _attach_recipes(model: nn.Module, recorder: Recorder) -> None:
    """Gives every module the recipes of its tensors; they stay with it when it is sharded or wrapped."""
    names: dict[int, list[str]] = {}
    saved = set(model.state_dict(keep_vars=True))
    places: list[tuple[nn.Module, str, Tensor]] = []
    for path, module in model.named_modules(remove_duplicate=False):
        for leaf, tensor in tensors_of(module).items():
            names.setdefault(id(tensor), []).append(f"{path}.{leaf}" if path else leaf)
            places.append((module, leaf, tensor))
    groups = tuple(tuple(n for n in group if n in saved) for group in names.values())
    optional = sorted(getattr(model, "_keys_to_ignore_on_load_missing", None) or ())
    whole = UnsplitModel(
        tuple(group for group in groups if group),
        hub_names(model),
        _ignored(model),
        tuple(optional),
        beside_text(model),
    )
    recipes = {
        id(t): Recipe(tuple(names[id(t)]), view_of(t), recorder.last(t), whole) for _, _, t in places if t.is_meta
    }
    for module, leaf, tensor in places:
        if tensor.is_meta:
            vars(module).setdefault(RECIPES, {})[leaf] = recipes[id(tensor)]
    parameters = {id(parameter) for parameter in model.parameters()}
    assign_owners(recipes[key] for key in sorted(recipes, key=lambda key: key not in parameters))


def _ignored(model: nn.Module) -> tuple[str, ...]:
    return (*sorted(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()), *_IGNORED_WEIGHTS)


def _convert_parameters(model: nn.Module, dtype: torch.dtype) -> None:
    """Replaces every parameter by a contiguous one of `dtype`, once for all the places it stands in."""
    new: dict[int, nn.Parameter] = {}
    for module in list(model.modules()):
        for leaf, old in list(own_parameters(module).items()):
            if old is None:
                continue
            if id(old) not in new:
                kept = dtype if old.is_floating_point() else old.dtype
                empty = torch.empty(old.shape, dtype=kept, device=META)
                new[id(old)] = nn.Parameter(empty, requires_grad=old.requires_grad)
                new[id(old)].__dict__.update(old.__dict__)
                new[id(new[id(old)])] = new[id(old)]
            setattr(module, leaf, new[id(old)])


def _freeze(model: nn.Module, patterns: list[str]) -> None:
    tied = {name: group for group in tied_names(model) for name in group}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for pattern in patterns:
        matched = fnmatch.filter(parameters, pattern)
        if not matched:
            raise ModelError(f"model.freeze: `{pattern}` matches no parameter.", "", did_you_mean(pattern, parameters))
        for name in matched:
            for same in tied.get(name, (name,)):
                parameters[same].requires_grad_(False)
