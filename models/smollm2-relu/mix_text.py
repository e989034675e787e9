"""Writes the texts that smollm2-relu was trained on: conversations, manuals and prose, in pieces, shuffled.

Run as `python mix_text.py FOLDER OUT`; README.md says what FOLDER holds.
"""

from __future__ import annotations

import argparse
import bz2
import email
import gzip
import html
import random
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

SEED = 7
PIECE = 6000  # characters
N_CHATS, N_PROSE = 4, 2  # files of a kind; reluify takes as much of each file
MANUAL_CHARS = 2_600_000
GCIDE = "dict-gcide/usr/share/dictd/gcide.dict.dz"
LANGUAGES = {"de", "fr", "it", "ja", "ru"}  # translations of Debian's manuals


def page_text(path: Path) -> str:
    """An HTML page without tags; plainer than tiny-relu's html_text.py: another text would not be what the figures are of."""
    text = path.read_text(encoding="utf-8", errors="ignore")
    text = re.sub(r"(?s)<(script|style|head).*?</\1>", "", text)
    text = html.unescape(re.sub(r"<[^>]+>", "", text))
    return re.sub(r"\n\s*\n+", "\n\n", text).strip()


def pages_text(folders: Iterable[Path]) -> str:
    """All English HTML pages of folders, in the order of their names."""
    return "\n\n".join(
        page_text(path)
        for folder in folders
        for path in sorted(folder.rglob("*.html"))
        if path.is_file() and not LANGUAGES & set(path.relative_to(folder).parts)
    )


def unzipped(path: Path) -> str:
    """A compressed text."""
    with gzip.open(path, "rt", encoding="utf-8", errors="ignore") as file:
        return file.read()


def unwrapped(path: Path) -> str:
    """A compressed text, its lines joined to paragraphs."""
    text = re.sub(r"(?<=[^\n])\n[ \t]*(?=[^\s*\-0-9])", " ", unzipped(path))
    return re.sub(r" +", " ", text)


def shuffled(texts: Sequence[str], rng: random.Random) -> str:
    """The pieces of texts, in another order."""
    pieces = [text[first : first + PIECE] for text in texts for first in range(0, len(text), PIECE)]
    rng.shuffle(pieces)
    return "\n\n".join(pieces)


def prose(folder: Path) -> list[str]:
    """Dictionaries, books and sayings of Debian's packages, and a part of the Bible."""
    sayings = [
        path.read_text(encoding="utf-8", errors="ignore").replace("\x08", "").replace("\n%\n", "\n\n")
        for path in sorted((folder / "fortunes/usr/share/games/fortunes").iterdir())
        if path.is_file() and not path.suffix
    ]
    handbook = sorted((folder / "debian-handbook/usr/share/doc/debian-handbook/html/en-US").glob("*.html"))
    return [
        unwrapped(folder / "jargon-text/usr/share/doc/jargon-text/jargon.txt.gz"),
        unwrapped(folder / "dict-foldoc/usr/share/dictd/foldoc.dict.dz")[:1_200_000],
        unzipped(folder / GCIDE)[10_000_000:10_500_000],
        "\n\n".join(page_text(path) for path in handbook),
        pages_text([folder / "developers-reference", folder / "debian-policy"])[:600_000],
        "".join(sayings)[:1_200_000],
        (folder / "kjv.txt").read_text(encoding="utf-8")[:500_000],
    ]


def speeches_and_novel(folder: Path) -> list[str]:
    """The State of the Union addresses and Moby-Dick, by npm's packages of stdlib."""
    return [
        "\n\n".join(path.read_text(encoding="utf-8") for path in sorted((folder / name / "package/data").glob("*.txt")))
        for name in ("datasets-sotu", "datasets-moby-dick")
    ]


def words(folder: Path) -> list[str]:
    """What WordNet says of each word, and a part of GCIDE that prose() doesn't have."""
    wordnet = re.sub(r"\n {5,}", " ", unzipped(folder / "dict-wn/usr/share/dictd/wn.dict.dz"))
    return [wordnet, unzipped(folder / GCIDE)[11_000_000:]]


def guides(folder: Path) -> list[str]:
    """Manuals of a web server, a mail server and an accounting program, and on securing Debian."""
    places = (
        "apache2-doc/usr/share/doc/apache2-doc/manual/en",
        "exim4-doc-html/usr/share/doc/exim4-doc-html/spec_html",
        "gnucash-docs/usr/share/doc/gnucash-docs/gnucash-guide-en",
        "harden-doc/usr/share/doc/harden-doc/html/en-US",
    )
    return [pages_text([folder / place]) for place in places]


def mail(folder: Path) -> list[str]:
    """What people wrote on mailing lists: plain text of the mails of SpamAssassin's corpus that aren't spam."""
    texts = []
    for path in sorted((folder / "datasets-spam-assassin/package/data").glob("easy-ham-*/*")):
        message = email.message_from_bytes(path.read_bytes())
        for part in message.walk():
            if part.get_content_type() == "text/plain":
                body = part.get_payload(decode=True).decode("latin-1").replace("\r", "").strip()
                texts.append(f"Subject: {message['subject']}\n\n{body}" if message["subject"] else body)
    return [text for text in texts if text]


def article_text(markup: str) -> str:
    """A Wikipedia article as plain text."""
    text = re.sub(r"(?s)<!--.*?-->|<ref[^>]*/>|<(ref|math|gallery)\b.*?</\1>", "", html.unescape(markup))
    n_found = 1
    while n_found:  # templates and tables hold others
        text, n_found = re.subn(r"(?s)\{\{[^{}]*\}\}|\{\|[^{}]*\|\}", "", text)
    text = re.sub(r"\[\[(?:File|Image|Category):(?:[^\[\]]|\[\[[^\[\]]*\]\])*\]\]", "", text)
    text = re.sub(r"\[\[(?:[^\[\]|]*\|)?([^\[\]]*)\]\]", r"\1", text)
    text = re.sub(r"\[\S+ ([^\]]*)\]|'{2,}|<[^>]+>", r"\1", text)
    return re.sub(r"\n\s*\n+", "\n\n", text).strip()


def articles(folder: Path) -> list[str]:
    """Articles of the piece of Wikipedia that gensim's tests have, without those on what anarchism.txt is about."""
    (path,) = (folder / "gensim/gensim/test/test_data").glob("enwiki-latest-pages-articles1.*-shortened.bz2")
    dump = bz2.decompress(path.read_bytes()).decode("utf-8")
    pages = re.findall(r"(?s)<title>(.*?)</title>.*?<text[^>]*>(.*?)</text>", dump)
    texts = [f"{title}\n\n{article_text(markup)}" for title, markup in pages if not title.startswith("Anarch")]
    return [text for text in texts if len(text) > 500]  # else a redirection


def opinions(folder: Path) -> list[str]:
    """News that gensim's tests have; editorials and reviews that VADER's lexicon was tested with, their sentences put together again."""
    news = (folder / "gensim/gensim/test/test_data/lee_background.cor").read_text(encoding="utf-8")
    texts = [news.replace("\n", "\n\n")]
    for name in ("nytEditorial", "amazonReview", "movieReview"):
        path = folder / f"vader/hutto_ICWSM_2014/{name}Snippets_GroundTruth.txt"
        last, parts = "", []
        for line in path.read_text(encoding="utf-8", errors="ignore").splitlines():
            number, _, sentence = line.split("\t", 2)
            whose = number.partition("_")[0]
            parts.append((" " if whose == last else "\n\n") + sentence)
            last = whose
        texts.append("".join(parts).strip())
    return texts


def code(folder: Path) -> list[str]:
    """The modules of Python's standard library."""
    modules = sorted((folder / "libpython3.11-stdlib/usr/lib/python3.11").glob("*.py"))
    return [path.read_text(encoding="utf-8") for path in modules if path.is_file()]


def main() -> None:
    """Writes the files of README.md's table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()

    def read(name: str) -> str:
        return (args.folder / f"{name}.txt").read_text(encoding="utf-8", errors="ignore")

    def write(name: str, text: str) -> None:
        (args.out / f"{name}.txt").write_text(text, encoding="utf-8")

    begin = "<|im_start|>system"
    chats = [begin + chat for chat in read("chat").split(begin)[1:]]
    n = len(chats) // N_CHATS
    for i in range(N_CHATS):
        write(f"chat{i + 1}", "".join(chats[i * n : (i + 1) * n]))
    rng = random.Random(SEED)
    write("manual1", shuffled([read("python")], rng)[:MANUAL_CHARS])
    write("manual2", shuffled([read("postgresql"), read("sqlite"), read("rust")], rng)[:MANUAL_CHARS])
    write("manual3", shuffled([read("git"), read("debian-reference"), read("r"), read("maxima")], rng))
    write("manual4", shuffled([read("man")], rng))
    write("manual5", shuffled(guides(args.folder), rng))
    write("code", shuffled(code(args.folder), rng))
    write("wiki", shuffled(articles(args.folder), rng))
    write("words", shuffled(words(args.folder), rng))
    write("opinion", shuffled(opinions(args.folder), rng))
    letters = mail(args.folder)
    random.Random(SEED).shuffle(letters)
    for i in range(2):
        write(f"mail{i + 1}", "\n\n".join(letters[i::2]))
    for first, texts in ((1, prose(args.folder)), (1 + N_PROSE, speeches_and_novel(args.folder))):
        text = shuffled(texts, random.Random(SEED))
        for i in range(N_PROSE):
            write(f"prose{first + i}", text[len(text) * i // N_PROSE : len(text) * (i + 1) // N_PROSE])


if __name__ == "__main__":
    main()
