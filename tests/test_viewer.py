"""The allocation viewer, in a real browser."""

import html
import json
import math
import re
import shutil
import subprocess

import pytest
import torch

import kvpass
from kvpass import cli, viewer
from tests.conftest import prompt

HOSTILE = ["<img src=x onerror=document.title='owned'>", "</script><script>document.title='owned'</script>"]
HOSTILE += ["<!--", "&lt;b&gt;", "\x00\x1b[0m", "\u202e\u2028", "{{7*7}}", "plain "]


class Words:
    """Decodes an id as one of the hostile texts."""

    def decode(self, ids):
        return HOSTILE[ids[0] % len(HOSTILE)]


def browse(page, tmp_path, address=""):
    """The page's document after its scripts ran, as HTML."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        pytest.fail("the viewer is tested in a browser and none is installed; on Debian: apt-get install -y chromium")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
    flags += ["--disable-component-update", "--disable-sync", "--disable-dev-shm-usage"]
    flags += [f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", f"file://{page}{address}"]
    return subprocess.run([browser, *flags], capture_output=True, text=True, check=True, timeout=120).stdout


@pytest.fixture
def saved(compiled, tmp_path):
    """A cache of 40 tokens and one step, two sequences, with full and sliding layers, saved with its text."""
    model = compiled("qwen2_mixed")
    cache, ids = model.kvpass.new_cache(), torch.cat([prompt(40, 2), prompt(2, 2, seed=1)], 1)
    with torch.no_grad():
        model(ids[:, :40], past_key_values=cache)
        model(ids[:, 40:41], past_key_values=cache)
    path = tmp_path / "cache.safetensors"
    cache.save(path, tokens=ids, tokenizer=Words())
    return model, cache, ids, path


def test_allocation_is_the_cache(saved):
    """Every row has as many entries as the cache says, which stand for no more tokens than it has seen."""
    _, cache, ids, path = saved
    found = viewer.allocation(path)
    assert found["seen"] == [41, 41]
    assert found["pieces"] == [[Words().decode([token]) for token in row[:41]] for row in ids.tolist()]
    counts = [[[len(head["exact"]) + len(head["other"]) for head in row] for row in rows] for rows in found["rows"]]
    assert counts == [lengths.tolist() for lengths in cache.lengths()]
    for rows in found["rows"]:
        for head in (head for row in rows for head in row):
            positions = head["exact"] + [pos for pos, _, _ in head["other"]]
            assert len(set(positions)) == len(positions) and 40 in positions
            assert len(head["exact"]) + sum(count for _, count, _ in head["other"]) <= 41


@pytest.mark.slow
def test_the_page_shows_every_token_and_its_kind(saved, tmp_path, capsys):
    """`kvpass view` writes a page on which each token is exact, merged or not kept, in the row that is chosen."""
    path, page = saved[-1], tmp_path / "view.html"
    assert cli.main(["view", str(path), "-o", str(page)]) == 0
    assert capsys.readouterr().out.startswith(f"wrote {page}")
    found = viewer.allocation(path)
    layer = max(index for index, window in enumerate(found["windows"]) if not window)
    row = found["rows"][layer][1][1]
    shown = browse(page, tmp_path, f"#{layer}.1.1")
    spans = re.findall(r'<span class="(\w+)" title="([^"]*)" data-pos="(\d+)">([^<]*)</span>', shown)
    assert [int(pos) for *_, pos, _ in spans] == list(range(41))
    assert [int(pos) for kind, _, pos, _ in spans if kind == "exact"] == sorted(row["exact"])
    told = {int(pos): said for _, said, pos, _ in spans}
    for pos, count, vote in row["other"]:
        assert f"{count} tokens" in told[pos] or count == 1
        each = re.search(r"votes, (\S+) a token", told[pos])
        assert count == 1 or float(each[1]) == pytest.approx(math.exp(vote) / count, rel=0.01)
    assert f"Layer {layer}, KV head 1: {len(row['exact']) + len(row['other'])} entries for 41 tokens" in shown
    cells = re.findall(r"<td[^>]*>(\d+)</td>", shown)
    assert [int(cell) for cell in cells] == [
        len(head["exact"]) + len(head["other"]) for rows in found["rows"] for head in rows[1]
    ]
    texts = [html.unescape(text) for *_, text in spans]
    assert all(text in texts for text in HOSTILE if text.isprintable())


@pytest.mark.slow
def test_text_cannot_leave_its_place(saved, tmp_path):
    """Markup, script ends and control characters in the text are shown as text and run nothing."""
    page = tmp_path / "view.html"
    page.write_text(viewer.page(viewer.allocation(saved[-1], [HOSTILE * 6, HOSTILE * 6])))
    shown = browse(page, tmp_path)
    assert "owned" not in re.search(r"<title>(.*?)</title>", shown)[1]
    assert "<img" not in shown and shown.count("<script") == 2
    assert "&lt;img src=x" in shown and "␀␛[0m" in shown


def test_nothing_is_loaded_from_elsewhere(saved):
    """The page names no address, and its policy lets only its own script run."""
    page = viewer.page(viewer.allocation(saved[-1], [["a"] * 41] * 2))
    assert "//" not in re.sub(r"^\s*//.*$", "", page, flags=re.MULTILINE)
    assert "default-src 'none'" in page and "CONTENT-SECURITY-POLICY" not in page
    assert re.search(r"script-src 'sha256-[\w+/]{43}='", page)


def test_without_text_positions_are_shown(saved, tmp_path):
    """A cache saved without text has no pieces; a JSON file can give them."""
    _, cache, _, path = saved
    cache.save(path)
    assert viewer.allocation(path)["pieces"] == [[], []]
    pieces = tmp_path / "pieces.json"
    pieces.write_text(json.dumps([["a"] * 50, ["b"] * 41]))
    assert cli.main(["view", str(path), "-o", str(tmp_path / "v.html"), "--pieces", str(pieces)]) == 0
    assert '"pieces":[["a",' in (tmp_path / "v.html").read_text()


@pytest.mark.parametrize(
    ("pieces", "reason"),
    [
        ("{", "is not JSON"),
        ('{"a": 1}', "are not 2 lists of texts"),
        ('[["a"]]', "are not 2 lists of texts"),
        ("[[1], [2]]", "are not 2 lists of texts"),
        ('[["a"], ["b"]]', "has seen 41 tokens of a sequence, of which only 1 texts are given"),
    ],
)
def test_wrong_pieces_are_refused(saved, tmp_path, capsys, pieces, reason):
    """Texts that do not fit the cache are refused in one sentence, and no page is written."""
    (tmp_path / "pieces.json").write_text(pieces)
    page = tmp_path / "v.html"
    assert cli.main(["view", str(saved[-1]), "-o", str(page), "--pieces", str(tmp_path / "pieces.json")]) == 2
    assert reason in capsys.readouterr().err and not page.exists()


def test_a_saved_text_changes_nothing_else(saved):
    """A cache saved with its text loads like one without; text without tokenizer, or of other tokens, is refused."""
    model, cache, ids, path = saved
    assert kvpass.load_cache(path, model).entries() == cache.entries()
    with pytest.raises(ValueError, match="tokens= and tokenizer= together"):
        cache.save(path, tokens=ids)
    with pytest.raises(ValueError, match=r"has seen \[41, 41\] tokens, tokens= has \[40, 40\]"):
        cache.save(path, tokens=ids[:, :40], tokenizer=Words())
    assert viewer.allocation(path)["pieces"][0]
