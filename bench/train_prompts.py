"""Builds the training prompts that the public ones lack: summaries, translations, questions on passages, questions.

Passages come from a public-domain text and from answers that the target itself gave to other prompts; German
sentences come from the grammar below, questions from names found in the given prompts. All is seeded and distinct,
and nothing is taken from an evaluation set.

    python bench/train_prompts.py --prompts P.jsonl.gz --text T.txt --answers DIR --model demo --out extra.jsonl.gz
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from specserve_drafts.train.answers import read_answers, read_training_prompts

from specserve.models.hub import resolve_model
from specserve.tokenizer import Tokenizer

PERSONS = """der Bürgermeister|der Außenminister|die Bundeskanzlerin|der Sprecher der Polizei
die Sprecherin des Konzerns
der Trainer|die Ministerin|der Präsident|die Forscherin|der Vorsitzende des Ausschusses|die Richterin|der Staatsanwalt
ein Augenzeuge|die Lehrerin|der Geschäftsführer|die Gewerkschaft|der Fahrer des Lastwagens|die Feuerwehr|der Kapitän
die Europäische Kommission|der Stadtrat|die Opposition|ein Sprecher des Ministeriums|der Verteidiger|die Mannschaft
der Künstler|die Schriftstellerin|der Leiter der Klinik|die Bank|der Verband der Automobilindustrie|mein Nachbar
die Regierung|der Abgeordnete|die Sängerin|ein junger Mann|die Mutter des Kindes|der Bauer|die Universität|der Chef
das Unternehmen|das Gericht|das Parlament|die Behörde|der Verein|der Torwart|die Schülerin|unser Lehrer|die Ärztin
der Flughafen|die Fluggesellschaft|der Hersteller|die Partei|der Bundestag|eine ältere Frau|das Museum|der Polizist"""
NAMES = """Müller|Schneider|Özdemir|Weber|Obama|Merkel|Hoffmann|Krüger|Schäfer|Fischer|Lehmann|Bauer|Wagner|Kramer
Thomas Becker|Anna Richter|Klaus Zimmermann|Julia Hartmann|Michael Braun|Sabine Vogel|Peter Lang|Karin Schulz
Martin Keller|Lena Schwarz|Johannes Wolf|Katharina Busch|Stefan Huber|Monika Frank|Jürgen Seidel|Petra Arnold"""
PLACES = """Berlin|Hamburg|München|Köln|Frankfurt|Stuttgart|Leipzig|Dresden|Bremen|Hannover|Nürnberg|Freiburg|Wien
Zürich
Paris|London|Madrid|Rom|Moskau|Peking|Singapur|New York|Washington|Tokio|Istanbul|Athen|Brüssel|Warschau|Kopenhagen
Bayern|Sachsen|Niedersachsen|Baden-Württemberg|Nordrhein-Westfalen|der Schweiz|Österreich|Frankreich|Spanien|Italien
Afghanistan|Syrien|Ägypten|der Türkei|den Vereinigten Staaten|Großbritannien|Griechenland|Brasilien|Südafrika|Indien
Mainz|Augsburg|Rottweil|Villingen-Schwenningen|Heilbronn|Ulm|Konstanz|Tuttlingen|Balingen|Sigmaringen|der Innenstadt"""
TIMES = """am Montag|am Dienstagabend|am Mittwoch|am Donnerstag|am Freitagmorgen|am Wochenende|gestern|heute
vor einer Woche
in der Nacht zum Sonntag|im vergangenen Jahr|im Sommer 2012|seit drei Monaten|Ende September|Anfang 2013|nach dem Unfall
vor Beginn der Saison|in den letzten zehn Jahren|kurz nach Mitternacht|in diesem Frühjahr|nach langer Diskussion
zum ersten Mal|bis zum 22. Oktober|am späten Nachmittag|in der vergangenen Woche|vor wenigen Tagen|zwei Tage später"""
OBJECTS = """den neuen Vertrag|das Projekt|die Entscheidung|den Plan der Regierung|die Ergebnisse der Studie
einen Fehler
das alte Rathaus|die Reform des Gesundheitswesens|neue Arbeitsplätze|den Bericht|die Krise|einen hohen Preis|das Spiel
die Zukunft der Stadt|die Rechte der Arbeitnehmer|das Konzert in der Kirche|die Sanierung der Straße|die Vorwürfe
das Gesetz|den Haushalt für das nächste Jahr|eine bessere Ausbildung|die Kosten der Behandlung|die Zahl der Touristen
den Schutz der Umwelt|ein gemeinsames Abendessen|die Wohnung im dritten Stock|den Verkauf der Aktien|die neue Schule
das beschädigte Flugzeug|den Rücktritt des Ministers|die Verhandlungen|eine halbe Million Euro|den Titel|das Geld
die Sicherheit im Straßenverkehr|das Wasser aus dem Fluss|die Fotos|den verletzten Spieler|die Krankenversicherung
die Pläne für den Bahnhof|das Angebot des Herstellers|die Steuern|den ersten Platz|das Vertrauen der Bürger"""
PARTICIPLES = """vorgestellt|verteidigt|abgelehnt|angekündigt|kritisiert|unterstützt|verloren|bezahlt|gefunden|besucht
verkauft|gewonnen|verhindert|bestätigt|gezeigt|erklärt|untersucht|vergessen|geplant|verändert|unterschrieben|gelobt
veröffentlicht|beschlossen|verschoben|gerettet|finanziert|übernommen|beendet|erhalten|gesehen|organisiert|verbessert"""
INFINITIVES = """verbessern|verhindern|verkaufen|unterstützen|ablehnen|überprüfen|beenden|fortsetzen|finanzieren
schützen
erklären|verschieben|gewinnen|bezahlen|vorstellen|kürzen|erhöhen|besichtigen|übernehmen|verändern|genehmigen|bauen"""
NOUNS = """Die Zahl der Besucher|Der Umsatz|Die Arbeitslosigkeit|Der Preis für Benzin|Die Temperatur|Die Nachfrage
Der Gewinn des Unternehmens|Die Zahl der Unfälle|Der Anteil der Frauen|Die Miete|Der Export|Die Produktion|Der Kurs
Die Zahl der Einwohner|Der Verbrauch von Strom|Die Zahl der Studenten|Der Schaden|Die Inflation|Der Wert des Hauses"""
CHANGES = (
    """gestiegen|gesunken|stark gewachsen|leicht zurückgegangen|deutlich gefallen|kaum verändert|erneut gestiegen"""
)
ADJECTIVES = """wichtig|schwierig|notwendig|gefährlich|überraschend|zu teuer|erfolgreich|unmöglich|sinnvoll|umstritten
klar
ungewöhnlich|sehr beliebt|dringend nötig|nicht mehr zeitgemäß|besonders schön|leider falsch|gut vorbereitet|zufrieden"""
REASONS = """weil das Geld fehlt|obwohl viele Bürger dagegen sind|da die Krise noch nicht vorbei ist
wenn das Wetter gut ist
nachdem die Polizei ermittelt hatte|bevor der Winter kommt|damit die Kinder sicher zur Schule gehen können
weil er sich am Knie verletzt hat|während die Preise weiter steigen|sobald alle Unterlagen vorliegen
als der Regen begann|obwohl niemand damit gerechnet hatte|da die Verhandlungen gescheitert sind
weil die Straße gesperrt war|wenn die Mehrheit zustimmt|ohne die Gründe zu nennen|um Kosten zu sparen
wie die Zeitung berichtet|so dass viele Züge ausfielen|bis eine Lösung gefunden ist|weil sie krank war"""
QUOTES = """Wir sind mit dem Ergebnis zufrieden|Das ist ein großer Tag für unsere Stadt|So kann es nicht weitergehen
Ich habe lange darüber nachgedacht|Die Lage bleibt ernst|Wir müssen endlich handeln|Niemand weiß, was passieren wird
Das verändert alles|Es gibt keinen Grund zur Sorge|Wir haben aus unseren Fehlern gelernt|Der Weg ist noch weit
Jeder soll eine Chance bekommen|Das war ein hartes Spiel|Die Menschen haben Angst|Wir brauchen mehr Zeit"""
VERBS_SAY = "sagte|meinte|erklärte|betonte|berichtete|forderte|antwortete|fügte hinzu"
THINGS = """das Auto|die Küche|der Garten|das Zimmer|die Kleidung|das Handy|die Reise|der Hund|die Suppe|der Computer
das Buch
die Fahrkarte|das Fahrrad|der Kuchen|die Lampe|das Frühstück|die Rechnung|der Schlüssel|das Restaurant|der Film"""
INSTRUCTIONS = (
    *["Translate German to English: {}"] * 6,
    "Translate the following sentence from German to English: {}",
    "Translate this German text to English.\n{}",
    "What does this German sentence mean in English? {}",
    "German: {}\nEnglish:",
)
TEMPLATES = """{Person} hat {time} {object} {participle} .
{Person} aus {place} will {object} {infinitive} , {reason} .
In {place} hat {person} {object} {participle} .
{noun} ist {time} in {place} {change} .
„ {quote} “ , {say} {person} {time} .
{name} {say} , {person} habe {object} {participle} .
{Time} wurde {object_n} in {place} {participle} .
Es ist {adjective} , {object} zu {infinitive} .
Wann wird {person} {object} {infinitive} ?
{name} und {name} wollen {object} gemeinsam {infinitive} .
Nach Angaben von {name} ist {thing} in {place} {adjective} .
{Person} , {who} in {place} wohnt , hat {object} {participle} .
Mehr als {number} Menschen haben {time} in {place} {object} {participle} .
{Thing} ist {adjective} , {reason} .
Haben Sie {time} {object} {participle} ?
Laut {name} muss {person} {object} {infinitive} , {reason} .
{Person} {say} {time} in {place} , dass {noun_l} {change} sei .
Damit {noun_v} {person} {object} nicht mehr {infinitive} .
Für {number} Euro kann man {time} {object} {infinitive} .
Der {number}-jährige {name} aus {place} hat {object} {participle} , {reason} .
Die Stadt {city} möchte bis {year} {object} {infinitive} und {object} {infinitive} .
Nicht zu vergessen {thing} und {object} .
{Reason} , hat {person} {object} {participle} .
Bei einem Unfall in {place} wurden {time} {number} Personen verletzt , {say} {person} .
Seit {year} lebt {name} in {place} und arbeitet für {person_a} ."""


def _list(text: str) -> list[str]:
    return [entry.strip() for entry in re.split(r"[|\n]", text) if entry.strip()]


WORDS = {
    "person": _list(PERSONS),
    "name": _list(NAMES),
    "place": _list(PLACES),
    "city": _list(PLACES)[:14],
    "time": _list(TIMES),
    "object": _list(OBJECTS),
    "object_n": [o for o in _list(OBJECTS) if o.startswith(("das ", "die ", "eine "))],
    "participle": _list(PARTICIPLES),
    "infinitive": _list(INFINITIVES),
    "noun": _list(NOUNS),
    "change": _list(CHANGES),
    "adjective": _list(ADJECTIVES),
    "reason": _list(REASONS),
    "quote": _list(QUOTES),
    "say": _list(VERBS_SAY),
    "thing": _list(THINGS),
    "who": ["der", "die", "welcher"],
    "noun_v": ["kann", "will", "muss", "soll", "darf"],
    "person_a": ["die Bank", "die Universität", "das Museum", "den Verein", "die Regierung", "das Unternehmen"],
}


def german_sentence(rng: random.Random) -> str:
    """One sentence of the grammar, half of the time with its punctuation set off by spaces."""

    def fill(match: re.Match[str]) -> str:
        slot = match.group(1)
        if slot == "number":
            return str(rng.choice((2, 3, 5, 12, 18, 25, 40, 73, 150, 300, 1200, 5000)))
        if slot == "year":
            return str(rng.randint(1970, 2025))
        if slot == "noun_l":
            found = rng.choice(WORDS["noun"])
            return found[0].lower() + found[1:]
        found = rng.choice(WORDS[slot.lower()])
        return found if slot.islower() else found[0].upper() + found[1:]

    text = re.sub(r"{(\w+)}", fill, rng.choice(TEMPLATES.split("\n")))
    if rng.random() < 0.5:
        text = re.sub(r" ([.,?])", r"\1", text).replace("„ ", "„").replace(" “", "“")
    return text


QUESTIONS = """Who is {}?|What is {}?|Where is {} located?|When did {} start?|Why is {} important?|Who invented {}?
How did {} begin?|What is {} known for?|When was {} founded?|Who played {} in the movie?|How many people live in {}?
What does {} mean?|Where does the name {} come from?|What happened to {}?|Who wrote {}?|Tell me about {}.
What are the main features of {}?|Where was {} filmed?|Who won the {} last year?|What year was {} born?
When does {} come out?|Who is the author of {}?|Who sings {}?|What is the difference between {} and {}?
How many episodes of {} are there?|What is the capital of {}?|Which country does {} belong to?|How old is {}?
What was the role of {} in history?|Where do most people in {} live?|Who owns {}?|When did {} win the championship?"""
TASKS = """Write a blog post about {}.|Write a short story about {} and {}.|Explain {} to a child.
Describe the advantages and disadvantages of {}.|Give me five tips about {}.|Write a persuasive email about {}.
Imagine you are an expert on {}. What would you tell a beginner?|Pretend to be a journalist who writes about {}.
Discuss the impact of {} on society.|Compare {} and {} in a few paragraphs.|Write a poem about {}.
Write an outline of an article about {}. Please answer in fewer than 200 words.|How does {} work? Explain step by step.
Create a list of questions to ask in an interview about {}.|Draft an announcement about {}.
Write a travel guide for someone interested in {}.|What are the most common mistakes with {}?
Summarize what you know of {}.
Give an example of how {} is used in everyday life.|Write a dialogue between two friends about {}.
Explain the history of {}.|Write a product description for {}.|What are the ethical questions around {}?
Act as a teacher and explain {} with an analogy.|Propose a plan to improve {} in your city."""
SUMMARIZE = (
    *["Summarize: {}"] * 5,
    "Summarize the following text:\n\n{}",
    "{}\n\nSummarize the text above in a few sentences.",
    "Write a short summary of this article.\n{}",
    "{}\nTL;DR:",
)
CONTEXT_QUESTION = (
    *["{context}\n{question}"] * 5,
    "Use the following pieces of context to answer the question.\n\n{context}\n\nQuestion: {question}",
    "Answer the question based on the context below.\nContext: {context}\nQuestion: {question}\nAnswer:",
    "Read the passage and answer the question.\n{context}\n{question}",
)
COMMON_WORDS = """A|An|And|As|At|But|By|For|From|He|Her|His|How|I|If|In|Is|It|Its|My|No|Not|Of|On|One|Or|She|So|That|The
Their|Then|There|These|They|This|To|We|What|When|Where|Which|While|Who|Why|With|You|Your|Answer|Question|Options|Sentence|Claim
True|False|Write|Given|Create|Find|Explain|After|Before|Each|Let|First|Step|Output|Input"""
COMMON = frozenset(_list(COMMON_WORDS))
NAME = re.compile(r"(?<![.?!:\n\"] )\b[A-Z][a-z]+(?: (?:of |the )?[A-Z][a-z]+)*\b")


def names_of(text: str) -> list[str]:
    """Capitalised phrases inside sentences, without their common first words."""
    found = []
    for phrase in NAME.findall(text):
        words = phrase.split()
        while words and words[0] in COMMON:
            words.pop(0)
        if words and len(" ".join(words)) > 3:
            found.append(" ".join(words))
    return found


def lowercase_topics(texts: list[str]) -> list[str]:
    """Two- and three-word phrases after an article that occur in several texts: topics to write about."""
    pattern = re.compile(r"\b(?:of|about|the|a) ((?:[a-z]{4,12} ){1,2}[a-z]{4,12})\b")
    counts = Counter(phrase for text in texts for phrase in set(pattern.findall(text)))
    return sorted(phrase for phrase, count in counts.items() if count >= 2)


@dataclass(frozen=True, slots=True)
class Material:
    """What prompts are made from."""

    articles: list[str]  # answers of the target, each one paragraph or more
    plays: str  # a public-domain text
    names: list[str]
    topics: list[str]

    def passage(self, rng: random.Random, length: int) -> str:
        """Text of about `length` characters: a cut of the plays, or articles one after the other."""
        if rng.random() < 0.25:
            start = rng.randrange(len(self.plays) - length)
            return self.plays[self.plays.index(" ", start) + 1 : start + length].rsplit(" ", 1)[0]
        parts: list[str] = []
        while sum(map(len, parts)) < length:
            parts.append(re.sub(r"\s+", " ", rng.choice(self.articles)))
        return " ".join(parts)[:length].rsplit(" ", 1)[0]

    def fill(self, rng: random.Random, pattern: str, pool: list[str]) -> str:
        """Each `{}` of a pattern replaced by one of the pool."""
        return re.sub(r"{}", lambda _: rng.choice(pool), pattern)


def summarize(material: Material, rng: random.Random) -> str:
    return rng.choice(SUMMARIZE).replace("{}", material.passage(rng, rng.randint(700, 2800)))


def translate(_: Material, rng: random.Random) -> str:
    return rng.choice(INSTRUCTIONS).replace("{}", german_sentence(rng))


def context_question(material: Material, rng: random.Random) -> str:
    chunks = [material.passage(rng, rng.randint(350, 700)) for _ in range(rng.randint(2, 5))]
    inside = names_of(" ".join(chunks)) or material.names
    question = material.fill(rng, rng.choice(_list(QUESTIONS)), inside)
    if rng.random() < 0.5:
        question = question[0] + question[1:].lower()
    return rng.choice(CONTEXT_QUESTION).format(context="\n".join(chunks), question=question)


def question(material: Material, rng: random.Random) -> str:
    text = material.fill(rng, rng.choice(_list(QUESTIONS)), material.names)
    return text[0] + text[1:].lower() if rng.random() < 0.5 else text


def task(material: Material, rng: random.Random) -> str:
    pool = material.topics if rng.random() < 0.7 else material.names
    return material.fill(rng, rng.choice(_list(TASKS)), pool)


MAKERS: dict[str, Callable[[Material, random.Random], str]] = {
    "ours/summarize": summarize,
    "ours/translate": translate,
    "ours/context_qa": context_question,
    "ours/question": question,
    "ours/task": task,
}


def build(material: Material, count: int, seed: int) -> Iterator[dict[str, str]]:
    """`count` distinct prompts of each kind."""
    for source, make in MAKERS.items():
        rng = random.Random(f"{seed} {source}")
        seen: set[str] = set()
        for _ in range(20 * count):
            if len(seen) == count:
                break
            prompt = make(material, rng)
            if prompt not in seen:
                seen.add(prompt)
                yield {"source": source, "prompt": prompt}


def load_material(prompts: Path, text: Path, answers: list[Path], model: str) -> Material:
    """Read the sources."""
    tokenizer = Tokenizer(resolve_model(model))
    texts = [prompt.text for prompt in read_training_prompts(prompts)]
    said = [tokenizer.decode(a.answer_ids).strip() for folder in answers for a in read_answers(folder)]
    articles = [answer for answer in said if len(answer) >= 200]
    names = sorted({name for entry in texts for name in names_of(entry)})
    return Material(articles, text.read_text(encoding="utf-8"), names, lowercase_topics(texts + said))


def main() -> None:
    """Write the prompts as JSONL, gzipped."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=Path, required=True, help="public training prompts, JSONL")
    parser.add_argument("--text", type=Path, required=True, help="a public-domain text")
    parser.add_argument("--answers", type=Path, nargs="+", required=True, help="folders of stage 1's answers")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--count", type=int, default=3000, help="prompts of each kind")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    material = load_material(args.prompts, args.text, args.answers, args.model)
    with gzip.open(args.out, "wt", encoding="utf-8") as file:
        for entry in build(material, args.count, args.seed):
            file.write(json.dumps(entry, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
