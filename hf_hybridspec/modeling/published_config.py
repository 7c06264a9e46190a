"""Reads the config.json of a published drafter checkpoint into the fields of our configurations.

Four layouts exist for the same few facts: flat keys, keys nested in `dflash_config` or `dspark_config` (or both), and
the speculators layout with a `transformer_layer_config`. They are merged into one flat dict. A key given twice with
different values, a key whose meaning is unknown, and a known key at a value that is not implemented are refused: each
of them would only lower the acceptance, silently.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from .published_keys import (
    FAMILY_KEYS,
    FAMILY_OF_ARCHITECTURE,
    FAMILY_OF_SPECULATORS_TYPE,
    NEUTRAL_VALUES,
    NOISE_KEYS,
    NOISE_PREFIXES,
    RENAMED_KEYS,
    REQUIRED_KEYS,
    SHARED_KEYS,
)

NESTED_SECTIONS = ("dspark_config", "dflash_config")
# Rope types whose frequencies do not change with the sequence, and the keys that each needs.
ROPE_TYPES = {"default": (), "linear": ("factor",), "yarn": ("factor", "original_max_position_embeddings")}
CONTAINERS = {"rope_parameters": dict, "rope_scaling": dict, "layer_types": list, "target_layer_ids": list}
ROPE_NOISE = ("partial_rotary_factor", "mrope_section", "mrope_interleaved")


@dataclass(frozen=True)
class PublishedConfig:
    """A published configuration in our words.

    family: "dflash", "dflash2", "dspark" or "ready". values: keyword arguments of that family's configuration class.
    """

    family: str
    values: dict[str, Any]


def read_published_config(
    raw: Mapping[str, Any], *, sample_from_anchor: bool | None = None, is_causal: bool | None = None
) -> PublishedConfig:
    """Merges, checks and renames the keys of a drafter's config.json.

    Args:
        raw: the parsed JSON; not mutated.
        sample_from_anchor: overrides the row alignment; needed where the file leaves it ambiguous.
        is_causal: overrides the causality of every layer inside the block; needed for a speculators file with
            sliding layers that does not state it.

    Raises:
        ValueError: unknown architecture; conflicting, unknown or unsupported keys (all of them are listed); missing
            keys that nothing else determines.
    """
    family = family_of(raw)
    overrides = {"sample_from_anchor": sample_from_anchor, "is_causal": is_causal}
    overrides = {key: value for key, value in overrides.items() if value is not None}
    speculators = "speculators_model_type" in raw
    flat = _flatten_speculators({**raw, **overrides}, family) if speculators else dict(raw)
    values, problems = _merge_sections(flat)
    if malformed := {
        key: values[key] for key, kind in CONTAINERS.items() if not isinstance(values.get(key, kind()), kind)
    }:
        raise ValueError(f"The drafter's config.json is malformed: {malformed}.")
    values = _apply_rope(values, flat, problems)
    problems += _unsupported(values, family)
    if problems:
        raise ValueError("The drafter's config.json cannot be used: " + "; ".join(problems) + ".")
    values |= overrides
    if values.get("draft_vocab_size") == values["vocab_size"]:
        # Not a reduced vocabulary: the target's head is borrowed.
        del values["draft_vocab_size"]
    family = _resolve_hybrid(values, family)
    if speculators:
        _require_stated_causality(raw, values)
    elif family_of(raw) in ("dspark", "ready") and values.get("sample_from_anchor") is False:
        # Native DSpark counts draft tokens in block_size; without a draft in the anchor's row the block is one longer.
        values["block_size"] += 1
    known = SHARED_KEYS | FAMILY_KEYS[family]
    return PublishedConfig(family, {key: value for key, value in values.items() if key in known})


def family_of(raw: Mapping[str, Any]) -> str:
    """The drafter family that a config.json names; raises ValueError with what is supported for any other."""
    supported = ", ".join([*FAMILY_OF_ARCHITECTURE, "speculators types " + "/".join(FAMILY_OF_SPECULATORS_TYPE)])
    speculators_type = raw.get("speculators_model_type")
    if speculators_type is not None:
        if speculators_type not in FAMILY_OF_SPECULATORS_TYPE:
            raise ValueError(f"speculators_model_type {speculators_type!r} is not supported. Supported: {supported}.")
        return FAMILY_OF_SPECULATORS_TYPE[speculators_type]
    architectures = raw.get("architectures") or []
    families = {FAMILY_OF_ARCHITECTURE[name] for name in architectures if name in FAMILY_OF_ARCHITECTURE}
    if len(families) != 1:
        looks_like = " This looks like a target model, not a drafter." if _is_target(architectures) else ""
        raise ValueError(
            f"architectures {architectures} names no supported drafter.{looks_like} Supported: {supported}."
        )
    return families.pop()


def _is_target(architectures: list[str]) -> bool:
    return any(name.endswith(("ForCausalLM", "ForConditionalGeneration")) for name in architectures)


def _merge_sections(flat: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """One dict of the top level and the nested sections; null means absent; unequal duplicates are problems."""
    found: dict[str, dict[str, Any]] = {}
    for section in (None, *NESTED_SECTIONS, "ready_config"):
        entries = flat if section is None else flat.get(section) or {}
        if not isinstance(entries, Mapping):
            raise ValueError(f"The drafter's config.json is malformed: {section} must be an object, got {entries!r}.")
        for key, value in entries.items():
            if value is None or (section is None and (key in NESTED_SECTIONS or key == "ready_config")):
                continue
            place = f"{section}.{key}" if section else key
            found.setdefault(RENAMED_KEYS.get((section, key), key), {})[place] = value
    values, problems = {}, []
    for key, places in found.items():
        distinct = list(places.values())
        if any(value != distinct[0] for value in distinct[1:]):
            problems.append(
                "conflicting values " + " and ".join(f"{place} = {value!r}" for place, value in places.items())
            )
        values[key] = distinct[0]
    return values, problems


def _apply_rope(values: dict[str, Any], flat: Mapping[str, Any], problems: list[str]) -> dict[str, Any]:
    """Joins `rope_parameters`, the older `rope_scaling` and a top-level `rope_theta` into one `rope_parameters`."""
    values = dict(values)
    rope: dict[str, Any] = {}
    for source in ("rope_parameters", "rope_scaling"):
        for key, value in (values.pop(source, None) or {}).items():
            key = "rope_type" if key == "type" else key
            if value is None or key in ROPE_NOISE:
                continue
            if rope.setdefault(key, value) != value:
                problems.append(
                    f"conflicting values rope_parameters.{key} = {rope[key]!r} and {source}.{key} = {value!r}"
                )
    theta = values.pop("rope_theta", None)
    if theta is not None and rope.setdefault("rope_theta", theta) != theta:
        problems.append(
            f"conflicting values rope_theta = {theta!r} and rope_parameters.rope_theta = {rope['rope_theta']!r}"
        )
    if "rope_theta" not in rope:
        problems.append("no rope_theta, neither in rope_parameters nor in rope_scaling nor at the top level")
    rope_type = rope.setdefault("rope_type", "default")
    if rope_type not in ROPE_TYPES:
        problems.append(f"rope_type {rope_type!r} is not supported (supported: {', '.join(ROPE_TYPES)})")
    elif missing := [key for key in ROPE_TYPES[rope_type] if key not in rope]:
        problems.append(f"rope_type {rope_type!r} needs {missing}")
    return values | {"rope_parameters": rope}


def _unsupported(values: Mapping[str, Any], family: str) -> list[str]:
    """Problems of keys that are unknown, belong to another family, or stand at a value that is not implemented."""
    unknown, problems = [], []
    for key, value in values.items():
        if key in SHARED_KEYS or key in FAMILY_KEYS[family] or key in NOISE_KEYS or key.startswith(NOISE_PREFIXES):
            continue
        if key in FAMILY_KEYS["dspark"] and family == "dflash":
            # Decided by _resolve_hybrid.
            continue
        if key in NEUTRAL_VALUES:
            if value not in NEUTRAL_VALUES[key]:
                allowed = " or ".join(repr(allowed) for allowed in NEUTRAL_VALUES[key])
                problems.append(f"{key} = {value!r} is not supported (supported: {allowed})")
        else:
            unknown.append(key)
    if unknown:
        problems.append(f"unknown keys {sorted(unknown)}")
    if values.get("use_sliding_window") and values.get("layer_types") is None:
        problems.append("use_sliding_window is true but no layer_types says which layers slide")
    if "mask_token" in values and values.get("mask_token_id") is None:
        problems.append("mask_token is given without mask_token_id")
    if missing := sorted(REQUIRED_KEYS - values.keys()):
        problems.append(f"missing keys {missing} (looked for at the top level and in {', '.join(NESTED_SECTIONS)})")
    if wrong := {key: values[key] for key in sorted(REQUIRED_KEYS & values.keys()) if type(values[key]) is not int}:
        problems.append(f"not integers: {wrong}")
    dtype = values.get("dtype")
    if dtype is not None and not isinstance(getattr(torch, str(dtype), None), torch.dtype):
        problems.append(f"dtype {dtype!r} is no torch dtype")
    projector = values.get("projector_type")
    if projector is not None and projector != ("dflash" if family.startswith("dflash") else "dspark"):
        problems.append(f"projector_type {projector!r} contradicts the architecture of family {family}")
    return problems


def _resolve_hybrid(values: Mapping[str, Any], family: str) -> str:
    """A DFlash architecture with a Markov head is a DSpark drafter whose alignment must be stated."""
    if family != "dflash" or not values.get("markov_rank"):
        return family
    if "sample_from_anchor" not in values:
        raise ValueError(
            "A DFlashDraftModel with a Markov head is ambiguous: row 0 of its block may or may not be a draft token. "
            "Pass sample_from_anchor=True (row k predicts the next position, as DSpark) or sample_from_anchor=False "
            "(row k predicts its own position, as DFlash)."
        )
    return "dspark"


def _flatten_speculators(raw: Mapping[str, Any], family: str) -> dict[str, Any]:
    """The speculators layout with the keys and conventions of the native one."""
    flat = {key: value for key, value in raw.items() if key not in ("transformer_layer_config", "speculators_config")}
    for key, value in (raw.get("transformer_layer_config") or {}).items():
        # model_type, architectures and dtype describe the container there.
        flat.setdefault(key, value)
    if raw.get("aux_hidden_state_layer_ids") is None:
        raise ValueError("A speculators drafter needs aux_hidden_state_layer_ids, which this config.json lacks.")
    # speculators counts the embedding output as layer 0.
    flat["target_layer_ids"] = [layer - 1 for layer in flat.pop("aux_hidden_state_layer_ids")]
    non_causal = flat.pop("sliding_window_non_causal", None)
    if non_causal:
        flat["is_causal"] = False
    flat["window_from_anchor"] = True
    if flat.pop("target_hidden_size", None) not in (None, flat.get("hidden_size")):
        raise ValueError(
            f"target_hidden_size {raw['target_hidden_size']} must equal hidden_size {flat.get('hidden_size')}."
        )
    if flat.get("sample_from_anchor") is None:
        flat["sample_from_anchor"] = _speculators_alignment(raw, family)
    return flat


def _speculators_alignment(raw: Mapping[str, Any], family: str) -> bool | None:
    """The alignment of a speculators file that does not state it: same position for DFlash; for DSpark the number of
    proposed tokens tells (block_size of them: shifted; one fewer: same position)."""
    if family != "dspark":
        return False
    methods = (raw.get("speculators_config") or {}).get("proposal_methods") or [{}]
    missing = (raw.get("block_size") or 0) - (methods[0].get("speculative_tokens") or 0)
    if missing not in (0, 1):
        raise ValueError(
            "A speculators DSpark drafter needs sample_from_anchor, or proposal_methods with speculative_tokens equal "
            "to block_size or block_size - 1; this config.json has neither. Pass sample_from_anchor=True or False."
        )
    return missing == 0


def _require_stated_causality(raw: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    stated = raw.get("sliding_window_non_causal") is not None or "is_causal" in values
    if not stated and "sliding_attention" in (values.get("layer_types") or []):
        raise ValueError(
            "This speculators drafter has sliding layers but no sliding_window_non_causal. Pass is_causal=False for "
            "bidirectional blocks (vLLM's reading), or add the key to its config.json."
        )
