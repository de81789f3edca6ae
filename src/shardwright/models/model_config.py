"""The Transformers config of a directory, with the run file's overrides merged in and seen to have an effect.

Overrides change single values: a key inside `rope_parameters` or `text_config` leaves its neighbours as the model has them. A
value that the config derives from other values is derived anew. A key may have the name that Transformers gives all models, or
that of this config.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from shardwright.arch.config_json import read_config as read_json
from shardwright.arch.families import refuse_quantized
from shardwright.config.schema import Model
from shardwright.errors import ConfigError, ModelError, did_you_mean

_ROPE = ("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor")
"""Keys of one fact: how rotary positions are made. Transformers keeps all of it in `rope_parameters`."""
_ROPE_OF_EVERY_TYPE = ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings")
"""What stays when another `rope_type` is asked for: the others are parameters of the old one."""
_ELSEWHERE = {
    "dtype": "precision.master_dtype",
    "torch_dtype": "precision.master_dtype",
    "attn_implementation": "model.attn_implementation",
    "_attn_implementation": "model.attn_implementation",
    "use_cache": "",
}
"""Keys of a config that the run decides: key of the run file, nothing where there is none."""
_SAME = (
    ("hidden_size", "n_embd", "d_model", "dim", "hidden_dim"),
    ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"),
    ("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"),
    ("num_key_value_heads", "num_kv_heads", "n_head_kv", "n_kv_heads"),
    ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "decoder_ffn_dim", "d_ff"),
    ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_sequence_length", "seq_length"),
    ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
    ("num_experts_per_tok", "top_k", "moe_top_k", "moe_k", "num_selected_experts"),
    ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps"),
    ("hidden_act", "hidden_activation", "activation_function", "activation"),
    ("rope_theta", "rotary_emb_base", "rope_global_base_freq"),
    ("partial_rotary_factor", "rotary_pct", "rope_pct"),
)
"""Names that configs have for one thing."""


def model_directory(spec: Model) -> Path:
    """The directory of `spec`; raises `ModelError` when it cannot be one."""
    directory = Path(spec.model_name_or_path)
    if not directory.is_dir():
        raise ModelError(
            f"model.model_name_or_path: there is no directory {spec.model_name_or_path}.",
            "Nothing is downloaded.",
            "Give a directory with config.json (`hf download NAME --local-dir DIR` makes one), or "
            "package.module:function.",
        )
    if not (directory / "config.json").is_file():
        raise ModelError(
            f"model.model_name_or_path: {directory} has no config.json.",
            "That file says what the model is.",
            "Give the directory that save_pretrained of Transformers wrote.",
        )
    return directory


def read_config(spec: Model) -> Any:
    """The Transformers config of the directory of `spec`, with `config_overrides` merged into it.

    Raises `ModelError` for a config that Transformers refuses, and for an override that is no key or has no effect.
    """
    from transformers import CONFIG_MAPPING

    path = model_directory(spec) / "config.json"
    try:
        values = dict(read_json(path))
    except ConfigError as error:
        raise ModelError(error.what, error.why, error.fix) from None
    kind = values.get("model_type")
    if kind not in CONFIG_MAPPING:
        raise ModelError(
            f"{path}: model_type {kind!r} is unknown to the installed Transformers.",
            "",
            did_you_mean(str(kind), CONFIG_MAPPING.keys())
            or "Write a function that builds the model and give it as package.module:function.",
        )
    refuse_quantized(values, path.parent)
    config = _built(CONFIG_MAPPING[kind], values, path)
    if not spec.config_overrides:
        return config
    honoured = set(_check_keys(spec.config_overrides, config, values, ()))
    merged = _merged(values, spec.config_overrides, config)
    result = _built(CONFIG_MAPPING[kind], merged, path)
    for keys, value in _leaves(spec.config_overrides):
        if keys not in honoured and value is not None:  # without a value the config derives one
            _check_effect(result, keys, value)
    return result


def _built(kind: Any, values: dict[str, Any], path: Path) -> Any:
    try:
        return kind.from_dict(copy.deepcopy(values))
    except Exception as error:  # Transformers validates in several ways; each says what is wrong
        raise ModelError(f"Transformers refuses {path}: {error}") from error


def _merged(values: Mapping[str, Any], overrides: Mapping[str, Any], config: Any) -> dict[str, Any]:
    """`values` of a config.json with `overrides`, under the names of `config`, which `values` alone give."""
    names = type(config).attribute_map
    result, given = _under_own_names(values, names), _under_own_names(overrides, names)
    rope = {key: given.pop(key) for key in _ROPE if key in given and hasattr(config, "rope_parameters")}
    if rope and (stray := next(filter(_says_rope, given), None)):
        raise ModelError(
            f"model.config_overrides: `{stray}` beside `{next(iter(rope))}`: both say how rotary positions are made.",
            "One of the two would be lost.",
            f"Say all of it in `{next(iter(rope))}`.",
        )
    for key, value in given.items():
        part: Any = getattr(config, key, None)
        if isinstance(value, dict) and hasattr(part, "to_dict"):
            own = result.get(key)
            result[key] = _merged(own if own is not None else part.to_dict(), value, part)
        elif isinstance(value, dict) and isinstance(result.get(key), dict):
            result[key] = _deep(result[key], value)
        else:
            result[key] = value
    if rope:
        changed = _rope(result, rope, config)
        result = {key: value for key, value in result.items() if not _says_rope(key)}
        result["rope_parameters"] = changed
    layers = names.get("num_hidden_layers", "num_hidden_layers")
    if layers in given:
        _fit_lists(result, given, config, int(getattr(config, layers)), int(given[layers]))
    return result


def _under_own_names(values: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """`values` by the names of this config; of two names for one thing the general one counts, as in Transformers."""
    own = {key: value for key, value in values.items() if key not in names}
    return own | {names[key]: value for key, value in values.items() if key in names}


def _deep(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(old)
    for key, value in new.items():
        both = isinstance(value, dict) and isinstance(result.get(key), dict)
        result[key] = _deep(result[key], value) if both else value
    return result


def _says_rope(key: str) -> bool:
    """Whether a key of a config.json says something that stands in `rope_parameters`, as old and new configs name it."""
    return key in _ROPE or (key.startswith("rope_") and key.endswith(("theta", "base_freq", "scaling")))


def _rope(values: Mapping[str, Any], given: Mapping[str, Any], config: Any) -> dict[str, Any]:
    """`rope_parameters` of a config whose file says `values`, with the overrides `given` under any of their names."""
    built = config.rope_parameters or {}
    by_layer = {kind for kind, own in built.items() if isinstance(own, dict)}
    old = _deep({}, built)
    for own in (old, *(old[kind] for kind in by_layer)):
        if "original_max_position_embeddings" not in _said_of_rope(values):
            own.pop("original_max_position_embeddings", None)  # derived by the config, and derived again
    new: dict[str, Any] = {key: given[key] for key in ("rope_theta", "partial_rotary_factor") if key in given}
    for key in ("rope_scaling", "rope_parameters"):
        if key in given:
            new |= {"rope_type": "default"} if given[key] is None else given[key]
    if not by_layer:
        return _one_rope(old, new)
    if stray := sorted(set(new) - by_layer):
        kinds = " or ".join(sorted(by_layer))
        raise ModelError(
            f"model.config_overrides: `{stray[0]}` sets rotary positions, which {type(config).__name__} has for each kind "
            "of layer.",
            f"The kind of layer for which `{stray[0]}` is meant is not known.",
            f"Write rope_parameters: {{{kinds}: {{{stray[0]}: ...}}}}.",
        )
    return {kind: _one_rope(old[kind], new.get(kind) or {}) for kind in by_layer}


def _said_of_rope(values: Mapping[str, Any]) -> set[str]:
    """Every key about rotary positions in `values` of a config.json."""
    said = [values.get("rope_parameters"), values.get("rope_scaling")]
    said += [own for rope in said if isinstance(rope, dict) for own in rope.values()]
    return {*values, *(key for rope in said if isinstance(rope, dict) for key in rope)}


def _one_rope(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """`old` with `new`; with another `rope_type`, only what every type has is kept of `old`."""
    new = {"rope_type" if key == "type" else key: value for key, value in new.items()}
    if new.get("rope_type", old.get("rope_type")) != old.get("rope_type"):
        old = {key: value for key, value in old.items() if key in _ROPE_OF_EVERY_TYPE}
    return {**old, **new}


def _fit_lists(values: dict[str, Any], given: Mapping[str, Any], config: Any, before: int, layers: int) -> None:
    """Cuts lists with an entry for each layer to `layers`; of more layers the config must go on with its own pattern."""
    from transformers import PretrainedConfig

    of_every_config = PretrainedConfig().to_dict().keys()
    for key, kinds in list(values.items()):
        if not isinstance(kinds, list) or len(kinds) != before or key in given or layers == before:
            continue
        if key in of_every_config or key.endswith(("_token_id", "architectures")):
            continue  # as long by chance
        if layers < before:
            values[key] = kinds[:layers]
            continue
        rest = {name: value for name, value in values.items() if name != key}
        try:
            grown = getattr(type(config).from_dict(copy.deepcopy(rest)), key)
        except Exception:  # whatever the config's own rule refuses
            grown = None
        if not isinstance(grown, list) or grown[:before] != kinds or len(grown) != layers:
            raise ModelError(
                f"model.config_overrides: {layers} layers where `{key}` of config.json lists {before}.",
                "The kinds of the further layers do not follow from this list.",
                f"Add `{key}` with {layers} entries to model.config_overrides.",
            )
        del values[key]


def _check_keys(
    overrides: Mapping[str, Any], config: Any, values: Mapping[str, Any], path: tuple[str, ...]
) -> Iterator[tuple[str, ...]]:
    """Raises `ModelError` for a key of `overrides` that `config` does not have, with the key that was meant.

    values: of the config.json, from which `config` is. Gives the keys that are no part of a config but are read when it is made
    (old names, for example): that they are read has been seen.
    """
    kind = type(config)
    known = {*kind().to_dict(), *kind.attribute_map, *(_ROPE if hasattr(config, "rope_parameters") else ())}
    for key, value in overrides.items():
        name = ".".join((*path, key))
        if key in _ELSEWHERE:
            home = _ELSEWHERE[key]
            raise ModelError(
                f"model.config_overrides: `{name}` has no effect.",
                f"{home} decides this value." if home else "Training keeps no cache of keys and values.",
                f"Set {home}." if home else f"Remove `{key}`.",
            )
        part: Any = getattr(config, kind.attribute_map.get(key, key), None)
        if key not in known and not (hasattr(part, "to_dict") and key in kind.sub_configs):
            if not _is_read(kind, values, key, value):
                raise ModelError(
                    f"model.config_overrides: `{name}` is not a key of {kind.__name__}.",
                    "The override would have no effect.",
                    _meant(key, known, config) or did_you_mean(key, known),
                )
            yield (*path, key)
        if isinstance(value, dict) and hasattr(part, "to_dict"):
            yield from _check_keys(value, part, values.get(key) or {}, (*path, key))


def _is_read(kind: Any, values: Mapping[str, Any], key: str, value: Any) -> bool:
    """Whether a config of `kind` made from `values` differs by more than `key` where that has another value."""
    try:
        found = [kind.from_dict(copy.deepcopy({**values, **more})).to_dict() for more in ({}, {key: value})]
    except Exception:  # whatever the config's own rules refuse
        return False
    return bool({**found[0], key: None} != {**found[1], key: None})


def _meant(key: str, known: Iterable[str], config: Any) -> str:
    """Names the key of `config` that another config calls `key`: under another name, or in the config of the text model."""
    same = next((names for names in _SAME if key in names), ())
    if found := next((name for name in same if name in set(known)), None):
        own = type(config).attribute_map.get(found, found)
        return f"{type(config).__name__} calls it `{own}`."
    for name in type(config).sub_configs:
        part: Any = getattr(config, name, None)
        inner = {*part.to_dict(), *type(part).attribute_map} if hasattr(part, "to_dict") else set()
        if "text" in name and key in inner:
            return f"Write {name}: {{{key}: ...}}."
    return ""


def _leaves(overrides: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """(path of keys, value) of everything in nested mappings."""
    for key, value in overrides.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, (*path, key))
        else:
            yield (*path, key), value


def _check_effect(config: Any, path: tuple[str, ...], wanted: Any) -> None:
    """Raises `ModelError` where the built config has another value than the override at `path` asks for."""
    found: Any = config
    for place, key in enumerate(path):
        if key in _ROPE and hasattr(found, "rope_parameters"):
            inside = path[place + 1 :] if key in ("rope_scaling", "rope_parameters") else (key,)
            if inside:
                _check_rope(found, ".".join(path), inside, wanted)
            return
        name = type(found).attribute_map.get(key, key) if hasattr(found, "attribute_map") else key
        found = found.get(key) if isinstance(found, dict) else getattr(found, name, None)
    if _plain(found) != _plain(wanted):
        raise _without_effect(config, ".".join(path), found, wanted)


def _check_rope(config: Any, name: str, inside: tuple[str, ...], wanted: Any) -> None:
    """The same for a key of `rope_parameters`, which its `rope_type` must know too."""
    from transformers.modeling_rope_utils import RopeParameters

    *kind, key = inside
    rope: Any = config.rope_parameters
    for layers in kind:
        rope = rope.get(layers, {})
    key = "rope_type" if key == "type" else key
    if rope.get(key) != wanted:
        raise _without_effect(config, name, rope.get(key), wanted)
    scaling = set(RopeParameters.__annotations__) - {"rope_type", "rope_theta", "partial_rotary_factor"}
    if key in scaling - _read_by(config, rope) and not key.startswith("mrope"):
        raise ModelError(
            f"model.config_overrides: `{name}` has no effect on rope_type {rope['rope_type']}.",
            "That type has no such parameter.",
            f"Set rope_type too, or remove `{key}`.",
        )


def _read_by(config: Any, rope: Mapping[str, Any]) -> set[str]:
    """The parameters that Transformers knows for the `rope_type` of `rope`."""
    found: set[str] = set()

    class Notes:
        """Stands for the config in its own validation, and notes which keys that allows."""

        @staticmethod
        def _check_received_keys(
            rope_type: str, received: set[str], required: set[str], optional_keys: Any = None, **_: Any
        ) -> None:
            found.update(required, optional_keys or ())

    validate = getattr(type(config), f"_validate_{rope['rope_type']}_rope_parameters", None)
    if validate is None:
        return set(rope)
    with suppress(Exception):  # what is noted comes first; the values have been validated already
        validate(Notes(), dict(rope), ignore_keys=None)
    return found


def _without_effect(config: Any, name: str, found: Any, wanted: Any) -> ModelError:
    return ModelError(
        f"model.config_overrides: `{name}` {wanted!r} has no effect: the config has {found!r}.",
        f"{type(config).__name__} takes this value from another key.",
        "Remove this override, or override the key that decides.",
    )


def _plain(value: Any) -> Any:
    """`value` as JSON has it."""
    return list(value) if isinstance(value, tuple) else value
