import gzip
import io
import json
import tarfile
import zipfile
from random import Random

import numpy as np
import pytest

from training.tiny import pack, packages
from training.tiny.build_corpus import write_gsm
from training.tiny.dialogues import HELDOUT_TEMPLATES, completion_dialogues, continuation_dialogues, gsm_dialogues
from training.tiny.documents import is_heldout, parse_chat, read_dialogues, read_documents
from training.tiny.pack import one_per_row, pack_rows, read_rows
from training.tiny.regenerate import save_answers
from training.tiny.sources import SOURCES, Source


def test_heldout_documents_never_appear_in_training(tiny_run):
    manifest = json.loads((tiny_run.corpus / "manifest.json").read_text())
    # Worked problems of the project's own have no held-out half.
    assert manifest.pop("chat_problems")["train_dialogues"] == 40
    assert not list((tiny_run.corpus / "heldout").glob("chat_problems*"))
    for name, entry in manifest.items():
        assert entry["train_documents"] + entry["heldout_documents"] == entry["documents"]
        path = tiny_run.corpus / "train" / f"{name}.txt.xz"
        if path.exists():
            heldout = set(read_documents(tiny_run.corpus / "heldout" / f"{name}.txt.xz"))
            assert not heldout & set(read_documents(path))
    assert any(entry["heldout_documents"] for entry in manifest.values())


def test_the_split_is_a_function_of_the_document_alone():
    texts = [f"document {i}" for i in range(5000)]
    heldout = [is_heldout(text, 30) for text in texts]
    assert heldout == [is_heldout(f"\n{text}\n", 30) for text in texts]
    assert 100 < sum(heldout) < 200


def test_heldout_templates_are_never_trained_on(tmp_path):
    def generator(number):
        def generate(rng, difficulty):
            return {"question": f"template {number}", "answer": "1", "metadata": {"answer_cot": "one\n#### 1"}}

        return generate

    generators = {number: generator(number) for number in range(100)}
    write_gsm(generators, tmp_path, train_count=600, heldout_count=100, seed=0)
    seen = {}
    for half in ("train", "heldout"):
        dialogues = read_dialogues(tmp_path / half / "chat_gsm.jsonl.xz")
        seen[half] = {int(dialogue.user_turns[0].split("\n")[0].split()[1]) for dialogue in dialogues}
    assert seen["heldout"] == set(HELDOUT_TEMPLATES)
    assert not seen["train"] & set(HELDOUT_TEMPLATES)
    assert len(seen["train"]) > 80


def test_a_generator_that_gives_up_is_drawn_again():
    def sometimes(rng, difficulty):
        if rng.random() < 0.5:
            raise ValueError("no valid numbers")
        return {"question": "q", "answer": "2", "metadata": {"answer_cot": "c\n#### 2"}}

    dialogues = list(gsm_dialogues({0: sometimes}, [0], 20, seed=1))
    assert len(dialogues) == 20
    thinking = [dialogue for dialogue in dialogues if dialogue.enable_thinking]
    assert thinking and all(dialogue.messages[-1]["reasoning_content"] == "c" for dialogue in thinking)


def test_completions_and_continuations_give_back_their_source():
    code = "def f(a):\n" + "".join(f"    b{i} = a + {i}  # a line of the body\n" for i in range(20)) + "    return a\n"
    (dialogue,) = completion_dialogues(Random(0), code)
    head = dialogue.messages[0]["content"].split("```python\n")[1].removesuffix("\n```")
    tail = dialogue.messages[1]["content"].removeprefix("```python\n").removesuffix("\n```")
    assert f"{head}\n{tail}" == code.strip()
    text = " ".join(f"Sentence number {i} is here." for i in range(200))
    dialogues = list(continuation_dialogues(Random(0), text))
    assert len(dialogues) > 2
    first = dialogues[0]
    prompt, answer = first.messages[0]["content"].split("\n\n", 1)[1], first.messages[1]["content"]
    assert text.startswith(f"{prompt} {answer}")


def test_chat_markup_is_parsed_and_trailing_questions_dropped():
    chat = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\nYo<|im_end|>\n"
    dialogue = parse_chat(chat + "<|im_start|>user\nBye<|im_end|>")
    assert dialogue.messages == [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}]
    assert parse_chat("<|im_start|>user\nHi<|im_end|>") is None


def test_packed_rows_lose_nothing():
    documents = [np.arange(i, i + size, dtype=np.uint16) for i, size in ((0, 5), (100, 6), (200, 7))]
    joined = np.concatenate(documents)
    rows = pack_rows(iter(documents), 4, whole=False)
    assert np.array_equal(rows.ravel(), joined[: rows.size])
    rows = pack_rows(iter(documents), 8, whole=True)
    # The second document crosses the first row's end and so starts the second row again.
    assert rows[0].tolist() == [0, 1, 2, 3, 4, 100, 101, 102]
    assert rows[1].tolist() == [100, 101, 102, 103, 104, 105, 200, 201]
    padded = one_per_row(iter(documents), 6, padding=9, limit=2)
    assert padded.tolist() == [[0, 1, 2, 3, 4, 9], [100, 101, 102, 103, 104, 105]]


def test_packed_text_is_the_corpus(tiny_run, tokenizer):
    rows = read_rows(tiny_run.packed, "train", "gsm")
    text = tokenizer.decode(rows[0].tolist())
    assert text.startswith("<|im_start|>user\nAnn has")
    assert rows.shape[1] == 64


def test_answers_are_packed_as_a_corpus_of_their_own(tmp_path, tiny_run, tokenizer):
    answers = [[n] * (5 + n) for n in range(1, 9)]
    save_answers(tmp_path / "answers.npz", answers, [2] * len(answers))
    output, end = tmp_path / "packed", tokenizer.convert_tokens_to_ids("<|endoftext|>")
    words = ["--answers", str(tmp_path / "answers.npz"), "--tokenizer", str(tiny_run.tokenizer)]
    pack.main([*words, "--output", str(output), "--length", "16", "--heldout-rows", "2"])
    train, heldout = (read_rows(output, half, "answers") for half in ("train", "heldout"))
    # Whole rows, prompt included, each with one end; what is held out is not trained on.
    assert heldout.shape == (2, 16) and all(row[-1] == end for row in heldout)
    kept_out = {int(row[0]) for row in heldout}
    trained = set(train.ravel().tolist()) - {end}
    assert trained and not trained & kept_out and trained | kept_out <= set(range(1, 9))
    assert [int((row == row[0]).sum()) for row in heldout] == [5 + int(row[0]) for row in heldout]
    with pytest.raises(SystemExit):
        pack.main([*words, "--corpus", str(tiny_run.corpus), "--output", str(output)])


def _tar(path, files):
    with tarfile.open(path, "w:gz") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))


def test_documents_are_read_out_of_packages(tmp_path, monkeypatch):
    with zipfile.ZipFile(tmp_path / "demo.whl", "w") as wheel:
        wheel.writestr("rich/a.py", "x = 1\n")
        wheel.writestr("rich/tests/b.py", "y = 2\n")
        wheel.writestr("rich/readme.md", "no code")
    task = {"task_description": "Add.", "input_output_spec": "Input: a", "code_sample": "def main_solution(a): ..."}
    _tar(tmp_path / "codeio.tgz", {"p/data/codeio.jsonl.gz": gzip.compress(json.dumps(task).encode())})
    speech = {"chapter": "1", "title": "Loomings.", "text": "Call me"}
    _tar(tmp_path / "moby.tgz", {"package/data/chapter_1.json": json.dumps(speech).encode()})
    chats = b"conversations:\n- - Hi\n  - Hello\n"
    _tar(tmp_path / "chatterbot.tgz", {"c/data/english/ai.yml": chats, "c/data/german/ai.yml": chats})
    archives = {"code_rich": "demo.whl", "chat_codeio": "codeio.tgz", "prose_moby": "moby.tgz"}
    archives["chat_chatterbot"] = "chatterbot.tgz"
    monkeypatch.setattr(packages, "download", lambda source, folder: folder / archives[source.name])
    by_name = {source.name: source for source in SOURCES}
    assert packages.read_source(by_name["code_rich"], tmp_path) == ["x = 1\n"]
    assert packages.read_source(by_name["prose_moby"], tmp_path) == ["CHAPTER 1. Loomings.\n\nCall me"]
    (codeio,) = packages.read_source(by_name["chat_codeio"], tmp_path)
    assert parse_chat(codeio).messages[0]["content"] == "Add.\n\nInput: a\n\nWrite the Python code."
    (chat,) = packages.read_source(by_name["chat_chatterbot"], tmp_path)
    assert parse_chat(chat).messages[1]["content"] == "Hello"
    assert list(packages.dictionary_entries("cat\n    n 1: an animal\ndog\n    n 1: another")) == [
        "cat\n    n 1: an animal",
        "dog\n    n 1: another",
    ]


def test_every_source_has_a_licence_and_a_pinned_version():
    for source in SOURCES:
        assert isinstance(source, Source) and source.licence and source.version
