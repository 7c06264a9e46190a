"""Worked solutions that begin by restating their problem."""

from random import Random

from training.tiny.dialogues import REASONING_REQUEST
from training.tiny.documents import Dialogue, read_dialogues, write_dialogues, write_documents
from training.tiny.restate import OPENING, REQUESTS, corpus_sentences, main, restated, restating_dialogues, spliced

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


def test_a_splice_begins_like_one_and_ends_like_the_other():
    first, second = "Ann buys red pens today.", "Nobody sells ink here."
    made = {spliced(first, second, Random(seed)) for seed in range(40)}
    assert all(text.startswith("Ann") and text.endswith("here.") for text in made)
    assert len(made) > 10 and first not in made
    assert len({spliced("Buy 7 pens.", "Buy 7 pens.", Random(seed)) for seed in range(40)} - {"Buy 7 pens."}) > 5


def test_tasks_restate_exactly_what_they_were_given():
    sentences = ["Ann buys red pens today.", "Nobody sells 12 litres of ink here.", "How many are left?"]
    dialogues = list(restating_dialogues(sentences, 60, seed=1))
    assert dialogues == list(restating_dialogues(sentences, 60, seed=1))
    for dialogue in dialogues:
        text, request = dialogue.user_turns[0].rsplit("\n", 1)
        reply = dialogue.messages[-1]
        told = reply.get("reasoning_content") or reply["content"]
        assert request in REQUESTS and told.startswith(OPENING)
        assert " ".join(line.removeprefix("- ") for line in told.split("\n")[1:]) == text
    assert 0 < sum(dialogue.enable_thinking for dialogue in dialogues) < 40


def test_command_draws_sentences_of_questions_and_prose(tmp_path):
    train = tmp_path / "train"
    question = {"role": "user", "content": f"Mia has three small figs. She eats one.\n{REASONING_REQUEST}"}
    write_dialogues(train / "chat_gsm.jsonl.xz", [Dialogue([question, {"role": "assistant", "content": "2"}])])
    write_documents(train / "prose_moby.txt.xz", ["It was a very long day. Yes."])
    write_documents(train / "code_rich.txt.xz", ["import this and that now."])
    assert corpus_sentences(train, 0) == ["Mia has three small figs.", "She eats one.", "It was a very long day."]
    main(["--corpus", str(tmp_path), "--count", "9"])
    assert len(list(read_dialogues(train / "chat_restated.jsonl.xz"))) == 9
