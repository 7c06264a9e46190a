"""Runs every system on every prompt, interleaved, in several sessions."""

import hashlib
from collections import Counter
from dataclasses import dataclass
from random import Random

from tqdm import tqdm
from transformers import PreTrainedModel

from ..calibration.capture import Prompt
from ..calibration.profile import CalibrationProfile
from ..calibration.timed_decode import DecodeSettings, TimedDecode, timed_decode
from ..modeling.drafter import Drafter
from ..modeling.verification_backends import use_verification
from .records import DecodeRecord, RecordFile
from .systems import System


@dataclass(frozen=True)
class BenchPlan:
    """What is decoded, by which systems (`systems` by name), how often."""

    prompts: list[Prompt]
    systems: dict[str, System]
    sessions: int
    settings: DecodeSettings


def run_sessions(
    target: PreTrainedModel,
    drafter: Drafter,
    profile: CalibrationProfile | None,
    plan: BenchPlan,
    file: RecordFile,
) -> None:
    """Decodes what `file` does not hold yet. For each prompt the systems run one after the other in random order."""
    for system in plan.systems.values():
        _decode(target, drafter, profile, plan.prompts[0], DecodeSettings(8), system)
    pairs = [(session, prompt) for session in range(plan.sessions) for prompt in plan.prompts]
    for session, prompt in tqdm(pairs, desc="bench", unit="prompt"):
        order = list(plan.systems.items())
        Random(f"{session}-{prompt.key}").shuffle(order)
        for name, system in order:
            if (name, prompt.key, session) not in file.records:
                run = _decode(target, drafter, profile, prompt, plan.settings, system)
                file.append(_record(name, prompt, session, run))


def _decode(target, drafter, profile, prompt: Prompt, settings: DecodeSettings, system: System) -> TimedDecode:
    policy = system.length_policy(profile)
    with use_verification(system.verification):
        return timed_decode(target, prompt.input_ids, settings, None if policy is None else drafter, policy)


def _record(name: str, prompt: Prompt, session: int, run: TimedDecode) -> DecodeRecord:
    lengths = Counter([1] * run.num_rounds if run.statistics is None else run.statistics.verification_lengths)
    return DecodeRecord(
        system=name,
        kind=prompt.kind,
        prompt=prompt.key,
        session=session,
        num_tokens=run.num_decoded,
        seconds=run.seconds,
        rounds=run.num_rounds,
        lengths={str(length): count for length, count in sorted(lengths.items())},
        digest=hashlib.sha256(str(run.token_ids).encode()).hexdigest()[:12],
        path="plain" if run.statistics is None else run.statistics.path,
    )
