"""Worked solutions that begin by restating their problem."""

from training.tiny.dialogues import REASONING_REQUEST
from training.tiny.documents import Dialogue
from training.tiny.restate import restated

QUESTION = "Mia has 3.5 kg of figs. She eats 1 kg! How many\nare left?"
RESTATED = "The problem says:\n- Mia has 3.5 kg of figs.\n- She eats 1 kg!\n- How many are left?"


def worked(**reply) -> Dialogue:
    user = {"role": "user", "content": f"{QUESTION}\n{REASONING_REQUEST}"}
    return Dialogue([user, {"role": "assistant", **reply}], enable_thinking="reasoning_content" in reply)


def test_answer_without_a_thought():
    dialogue = worked(content="2.5 kg are left.")
    assert restated(dialogue).messages[-1]["content"] == f"{RESTATED}\n\n2.5 kg are left."
    assert dialogue.messages[-1]["content"] == "2.5 kg are left."


def test_thought_takes_the_restatement():
    reply = restated(worked(content="2.5", reasoning_content="3.5 - 1 = 2.5")).messages[-1]
    assert reply["reasoning_content"] == f"{RESTATED}\n\n3.5 - 1 = 2.5" and reply["content"] == "2.5"


def test_the_question_stays_and_needs_no_request():
    dialogue = Dialogue([{"role": "user", "content": QUESTION}, {"role": "assistant", "content": "2.5"}])
    told = restated(dialogue)
    assert told.messages[0] == dialogue.messages[0]
    assert told.messages[-1]["content"].startswith(RESTATED)
