"""CalibrationProfile: what calibration found about one target, drafter, device and dtype. Data, as one JSON file.

A leaf: it imports nothing of ours, so that decoding can read a profile without the code that measures.
"""

import hashlib
import json
import os
import tempfile
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

FORMAT = "hf-hybridspec-profile"
VERSION = 1
NUM_WEIGHTS = 6
REDO = "Run `hf-hybridspec calibrate` again"


@dataclass(frozen=True)
class PairIdentity:
    """What a profile was measured on. Names are for people; the fingerprints decide.

    Attributes:
        target, drafter: names or paths.
        target_fingerprint, drafter_fingerprint: digests of architecture and sampled weights.
        num_draft_tokens: D of the drafter's full block.
        device: a GPU's product name, or `cpu`.
        dtype: of the target.
        engine: the loop that was timed, such as `eager`.
    """

    target: str
    target_fingerprint: str
    drafter: str
    drafter_fingerprint: str
    num_draft_tokens: int
    device: str
    dtype: str
    engine: str


@dataclass(frozen=True)
class AcceptanceModel:
    """P(draft i accepted | its prefix was): isotonic map of the confidence by position, then a logistic model.

    Attributes:
        confidence_knots, acceptance_knots: D rows of ascending numbers, the isotonic maps.
        weights: logistic weights of calibrated confidence, position, their product, log(1 + entropy), log of the
            entropy over its running average; then the intercept.
        temperatures: D divisors of a confidence head's logits (sequential temperature scaling), or None.
    """

    confidence_knots: tuple[tuple[float, ...], ...]
    acceptance_knots: tuple[tuple[float, ...], ...]
    weights: tuple[float, ...]
    temperatures: tuple[float, ...] | None


@dataclass(frozen=True)
class CostModel:
    """Latencies in seconds.

    Attributes:
        measured: decode time of a round at w = 2..D + 1.
        fitted: the quadratic fit at the same lengths.
        fixed: the part of `fitted` that no length changes; C_tgt(w) is `fitted` minus it.
        stage0_row: s, one more row in Layer 0 up to its router.
        expert: eta, one more distinct expert in one MoE layer.
        autoregressive: one token without a drafter.
    """

    measured: tuple[float, ...]
    fitted: tuple[float, ...]
    fixed: float
    stage0_row: float
    expert: float
    autoregressive: float

    def target_seconds(self, length: int) -> float:
        """C_tgt(w)."""
        return self.fitted[length - 2] - self.fixed

    def round_seconds(self, length: int) -> float:
        """C_tgt(w) plus the fixed per-round cost."""
        return self.fitted[length - 2]


@dataclass(frozen=True)
class RoutingTables:
    """Average new (layer, expert) pairs that row w0 + 1 adds over all MoE layers, for w0 = 1..D.

    Attributes:
        new_pairs: D averages.
        new_pairs_given: D rows; entry n is the average given n new Layer-0 experts. Rows of length 1 without an MoE.
    """

    new_pairs: tuple[float, ...]
    new_pairs_given: tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class ReliabilityBin:
    """One bar of a reliability diagram: mean prediction, accepted share and count of a bin."""

    predicted: float
    observed: float
    count: int


@dataclass(frozen=True)
class FitQuality:
    """How well the parts fit.

    Attributes:
        reliability: of the prefix-acceptance probabilities, 15 bins, empty ones left out.
        calibration_error: count-weighted mean of |predicted - observed| over the bins.
        brier_score: mean squared error of the same probabilities.
        held_out: whether these come from prompts that the model was not fitted on (cross-validation).
        cost_r2: of the quadratic cost fit.
        routing_correlation: of new Layer-0 experts with new later-layer pairs, position means removed; 0 without MoE.
    """

    reliability: tuple[ReliabilityBin, ...]
    calibration_error: float
    brier_score: float
    held_out: bool
    cost_r2: float
    routing_correlation: float


@dataclass(frozen=True)
class CalibrationProfile:
    """Everything a length policy needs, frozen after calibration (HybridSpec, appendix A.2).

    Attributes:
        rho: tokens per second at which latency is converted into tokens; the pooled throughput of the selector.
        static_length: the fixed length with the highest pooled throughput on the calibration rounds.
        prompts, prompts_hash, prompt_keys: name of the calibration prompts, hash of their set, hash of each.
        notes: fallbacks that calibration took, in words.
    """

    pair: PairIdentity
    acceptance: AcceptanceModel
    costs: CostModel
    routing: RoutingTables
    rho: float
    static_length: int
    quality: FitQuality
    prompts: str
    prompts_hash: str
    prompt_keys: tuple[str, ...]
    num_rounds: int
    software: str
    notes: tuple[str, ...]

    def __post_init__(self):
        drafts = self.pair.num_draft_tokens
        _check_rows("acceptance.confidence_knots", self.acceptance.confidence_knots, drafts)
        _check_rows("acceptance.acceptance_knots", self.acceptance.acceptance_knots, drafts)
        _check_rows("routing.new_pairs_given", self.routing.new_pairs_given, drafts)
        counted = {
            "acceptance.weights": (self.acceptance.weights, NUM_WEIGHTS),
            "costs.measured": (self.costs.measured, drafts),
            "costs.fitted": (self.costs.fitted, drafts),
            "routing.new_pairs": (self.routing.new_pairs, drafts),
        }
        if self.acceptance.temperatures is not None:
            counted["acceptance.temperatures"] = (self.acceptance.temperatures, drafts)
        for name, (values, expected) in counted.items():
            if len(values) != expected:
                raise ValueError(f"{name} must have {expected} numbers, got {len(values)}")
        if not self.rho > 0 or min(self.costs.fitted) <= 0:
            raise ValueError("rho and costs.fitted must be positive")

    def check_pair(self, pair: PairIdentity) -> None:
        """Raises ValueError, naming every difference, unless the profile was measured on `pair`."""
        measured = self.pair
        differences = [
            f"its {name} is {getattr(measured, name)}, this call's is {getattr(pair, name)}"
            for name in ("device", "dtype", "engine")
            if getattr(measured, name) != getattr(pair, name)
        ]
        for name in ("target", "drafter"):
            if getattr(measured, f"{name}_fingerprint") != getattr(pair, f"{name}_fingerprint"):
                differences.append(
                    f"it was measured with the {name} {getattr(measured, name)!r}, whose weights or sizes differ from "
                    f"{getattr(pair, name)!r}"
                )
        if pair.num_draft_tokens > measured.num_draft_tokens:
            differences.append(f"it covers {measured.num_draft_tokens} draft tokens, not {pair.num_draft_tokens}")
        if differences:
            raise ValueError(f"The calibration profile does not fit: {'; '.join(differences)}. {REDO} for this pair.")

    # ------------------------------------------------------------------------------------------------------- JSON

    def save(self, path: str | os.PathLike) -> None:
        """Writes the profile as JSON; the file at `path` is replaced in one step or not at all."""
        content = asdict(self)
        record = {"format": FORMAT, "version": VERSION, "checksum": _checksum(content), "profile": content}
        write_atomically(path, json.dumps(record, indent=1) + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike) -> "CalibrationProfile":
        """Reads a profile that `save` wrote.

        Raises:
            ValueError: the file is missing, no profile, of another version, or was changed after calibration.
        """
        try:
            record = json.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise ValueError(f"The profile {path} cannot be read ({error.strerror}). {REDO}.") from error
        except ValueError as error:
            raise ValueError(f"{path} is no valid JSON ({error}). {REDO}.") from error
        if not isinstance(record, dict) or record.get("format") != FORMAT:
            raise ValueError(f"{path} is not a calibration profile. {REDO} with `--output {path}`.")
        if record.get("version") != VERSION:
            raise ValueError(f"{path} has format version {record.get('version')!r}, this is {VERSION}. {REDO}.")
        content = record.get("profile")
        if record.get("checksum") != _checksum(content):
            raise ValueError(f"{path} was changed after it was calibrated: its checksum differs. {REDO}.")
        return _record_of(cls, content)


RECORDS = {
    "pair": PairIdentity,
    "acceptance": AcceptanceModel,
    "costs": CostModel,
    "routing": RoutingTables,
    "quality": FitQuality,
}


def write_atomically(path: str | os.PathLike, text: str) -> None:
    """Writes a text file through a temporary neighbour, so that readers see the old file or the whole new one."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _checksum(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _record_of(kind: type, content: dict[str, Any]) -> Any:
    """A record from JSON: lists become tuples, nested objects the records that `RECORDS` names."""
    values = {}
    for field in fields(kind):
        value = content[field.name]
        if field.name in RECORDS:
            value = _record_of(RECORDS[field.name], value)
        elif field.name == "reliability":
            value = tuple(ReliabilityBin(**entry) for entry in value)
        values[field.name] = _frozen(value)
    return kind(**values)


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


def _check_rows(name: str, rows: tuple, count: int) -> None:
    if len(rows) != count or any(not row for row in rows):
        raise ValueError(f"{name} must have {count} rows of numbers, got {len(rows)}")
