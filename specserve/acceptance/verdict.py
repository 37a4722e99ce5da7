"""What the figures mean, in plain words: a pure function from one side's figures to sentences.

The first sentence says how it stands, each further one names a cause that the figures show, the last what to try. The
thresholds are judgements, not laws; each stands beside its name.
"""

from __future__ import annotations

from collections.abc import Mapping

from specserve.acceptance.figures import Figures

# drafters that find their guesses in text, and those that compute them
FROM_TEXT = frozenset(("ngram", "suffix", "recycling", "prediction"))
FROM_MODEL = frozenset(("eagle", "early_exit", "draft_model"))

# what tells reasons apart: of trees that were lost, and of sequences that were asked or could not be
LOST = ("raised", "tree that")
ASKED = ("proposed nothing", "ended with its first token")

GOOD_LENGTH = 1.8
FEW_STEPS = 0.25  # a quarter of all steps: worth a sentence
LOW_FIRST = 0.25  # first guesses that come true: a head that fits its target has twice that
MUCH_AT_STOP = 0.2
SHORT_ANSWER = 12.0  # tokens
GREEDY = 1e-5
NOTICEABLE = 0.02
SLOW_DRAFT = 0.2  # of a step's time


def verdict(
    figures: Figures,
    drafter: str,
    temperature: float = 0.0,
    num_draft_tokens: int | None = None,
    without_loops: Figures | None = None,
) -> list[str]:
    """Sentences about one side.

    Args:
        without_loops: the same side's figures over the answers that do not loop, if any does.
    """
    if not figures.num_steps:
        return ["No step could have drafted: every answer ended with its first token."]
    found = [_standing(figures)]
    if figures.num_different:
        found.insert(0, different(figures.num_different, figures.num_prompts))
    if not figures.num_drafts:
        return [*found, *_nothing(figures, drafter, num_draft_tokens)]
    if figures.acceptance_length < GOOD_LENGTH:
        found += _why_low(figures, drafter, temperature, num_draft_tokens)
    found += _losses(figures.inactive)
    found += _time(figures)
    found += _loops(figures, without_loops)
    return found + _advice(figures, num_draft_tokens)


def different(num_different: int, num_prompts: int) -> str:
    """Promise 1 is broken, or the environment is not one."""
    return (
        f"WRONG: {num_different} of {num_prompts} answers have other ids than without speculation. Speculation never"
        " changes a token, so this is a fault: please report it with the output of `specserve verify`."
    )


def _standing(figures: Figures) -> str:
    told = f"A step commits {figures.acceptance_length:.2f} tokens (1 without speculation)"
    if figures.speedup is None:
        return told + "."
    if abs(figures.speedup - 1) <= NOTICEABLE:
        return told + ", and a token takes as long as without."
    how = "faster" if figures.speedup > 1 else "SLOWER"
    return told + f", and tokens come {max(figures.speedup, 1 / figures.speedup):.2f} times {how} than without."


def _nothing(figures: Figures, drafter: str, num_draft_tokens: int | None) -> list[str]:
    if drafter == "off":
        return ["Speculation is off."]
    if num_draft_tokens == 0:
        return ["Nothing was drafted: num_draft_tokens is 0."]
    if figures.num_asked and figures.num_unmatched == figures.num_asked:
        return [f"Nothing was drafted: {drafter!r} was asked {figures.num_asked} times and never had a guess."]
    reasons = _reasons(figures.inactive)
    return [f"Nothing was drafted: {reasons}." if reasons else "Nothing was drafted, and no reason is known."]


def _why_low(figures: Figures, drafter: str, temperature: float, num_draft_tokens: int | None) -> list[str]:
    found = [*_not_asked(figures, num_draft_tokens), *_no_match(figures, drafter), *_mismatch(figures, drafter)]
    if temperature > GREEDY:
        found.append(
            f"At temperature {temperature:g} the target often draws a token that is not its likeliest one, which no"
            " guess can foresee; --temperature 0 shows what is left without that."
        )
    drafted_at_stop = figures.num_drafted_at_stop or 0
    if drafted_at_stop / figures.num_draft_tokens > MUCH_AT_STOP:
        share = _percent(drafted_at_stop / figures.num_draft_tokens)
        found.append(f"Stops: {share} of the draft tokens fell into steps in which an answer ended.")
    mean_tokens = figures.num_tokens / figures.num_prompts
    if mean_tokens < SHORT_ANSWER:
        found.append(f"Answers are short, {mean_tokens:.1f} tokens on average: there is little to draft.")
    return found


def _not_asked(figures: Figures, num_draft_tokens: int | None) -> list[str]:
    if figures.num_asked is None:
        idle = 1 - figures.num_drafts / figures.num_steps
        if idle < FEW_STEPS:
            return []
        return [
            f"{_percent(idle)} of the steps drafted nothing; from outside one cannot see whether anybody was asked."
        ]
    share = 1 - figures.num_asked / figures.num_steps
    if share < FEW_STEPS:
        return []
    why = _reasons({r: n for r, n in figures.inactive.items() if not any(mark in r for mark in LOST + ASKED)})
    if not why:
        chosen = "the controller expected no gain at the step times and acceptance it saw"
        why = chosen if num_draft_tokens is None else "tokens, pages or the answer's end left no room"
    return [f"In {_percent(share)} of the steps the draft budget was zero, because {why}."]


def _no_match(figures: Figures, drafter: str) -> list[str]:
    if not figures.num_asked or figures.num_unmatched is None:
        return []
    share = figures.num_unmatched / figures.num_asked
    if share < FEW_STEPS:
        return []
    why = ": the last tokens occur nowhere in what it looks at" if drafter in FROM_TEXT else ""
    return [f"No match: in {_percent(share)} of the steps in which {drafter!r} was asked it had no guess{why}."]


def _mismatch(figures: Figures, drafter: str) -> list[str]:
    first = figures.positions[0].accepted / figures.num_drafts if figures.positions else 0.0
    if first >= LOW_FIRST:
        return []
    told = f"Only {_percent(first)} of the first guesses came true"
    if drafter in FROM_MODEL:
        return [
            f"{told}: head mismatch. A head or draft model that fits its target reaches 50 % and more. Was it trained"
            " for these very weights, and for text like this, and does its configuration match its layout?"
        ]
    if drafter in FROM_TEXT:
        return [f"{told}: this text repeats itself little, and {drafter!r} knows nothing else."]
    return [f"{told}."]


def _losses(inactive: Mapping[str, int]) -> list[str]:
    lost = {reason: count for reason, count in inactive.items() if any(mark in reason for mark in LOST)}
    return [f"Drafts were lost in {sum(lost.values())} answers: {_reasons(lost)}."] if lost else []


def _time(figures: Figures) -> list[str]:
    time, speedup = figures.time, figures.speedup
    if time is None or speedup is None or not time.step_ms or figures.acceptance_length < speedup * 1.15:
        return []
    longer = figures.acceptance_length / speedup
    told = f"The tokens gained are partly lost again: a step takes {longer:.2f} times as long as a plain one"
    if time.draft_ms / time.step_ms > SLOW_DRAFT:
        return [f"{told}, and {_percent(time.draft_ms / time.step_ms)} of it is drafting."]
    return [f"{told}, because the target checks {figures.num_draft_tokens / figures.num_steps:.1f} more rows in it."]


def _loops(figures: Figures, without_loops: Figures | None) -> list[str]:
    if not figures.num_looping:
        return []
    told = f"{figures.num_looping} of {figures.num_prompts} answers end in a loop, which flatters speculation"
    if without_loops is None:
        return [told + "; no other is left to judge by."]
    return [f"{told}: without them a step commits {without_loops.acceptance_length:.2f} tokens."]


def _advice(figures: Figures, num_draft_tokens: int | None) -> list[str]:
    if figures.best_fixed is None:
        return []
    best = figures.fixed[figures.best_fixed]
    plain = figures.fixed[0].tokens_per_second
    if not figures.best_fixed or not plain:
        return ["By estimate no fixed draft length pays here: leave speculation off, or to the controller."]
    beyond = ", which is more than this run ever asked for" if best.beyond else ""
    told = f"By estimate the best fixed draft length is {figures.best_fixed}{beyond}"
    told += f": {best.tokens_per_second / plain:.2f} times the tokens a second of plain decoding"
    same = num_draft_tokens == figures.best_fixed
    return [told + (", and it is the one that you chose." if same else ".")]


def _reasons(inactive: Mapping[str, int]) -> str:
    """The commonest reasons first."""
    ordered = sorted(inactive.items(), key=lambda item: (-item[1], item[0]))
    return "; ".join(reason for reason, _ in ordered[:3])


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
