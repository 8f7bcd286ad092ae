"""Explain the words of what the command prints."""

import re
from textwrap import fill

WORDS = {
    "rank": "a worker of the pipeline, which holds a stage or several",
    "stage": "a part of the model",
    "chunk": "one of the stages of a rank that holds several",
    "microbatch": "a part of the batch, which goes through the stages by itself",
    "chain": "a path of stages that some microbatches take; with several, ranks hold replicas of stages",
    "instruction": (
        "a thing that a rank does: F forward, B backward, I and W its two parts, the input and the weight"
        " gradient, (F;B)OVERLAP_F_B a pair as one; SEND and RECV messages, LOAD data, OFFLOAD and FETCH"
        " activations, RECOMPUTE them, UNSHARD and RESHARD parameters, REDUCE_GRAD and REDUCE_TIED sums of"
        " gradients over replicas and over tied parameters, STEP the optimizer"
    ),
    "input gradient": (
        "the part I of a backward B, which the stage before waits for; the weight gradient W is the other"
        " part"
    ),
    "1F1B": "one forward and one backward in turn",
    "source, head": (
        "the two orders of messages in DeepSpeed: with source a rank receives an activation before it sends a"
        " gradient"
    ),
    "warm-up": "the forwards of a rank before its first backward",
    "activation": "what the forward of a microbatch keeps for its backward",
    "peak activations": "the most that a rank holds at one time, per rank",
    "cap": "the most memory that a rank may take",
    "memory": "the parameters of a rank and its peak of activations, in one unit",
    "group": "microbatches that go through one chunk before the rank turns to the next chunk",
    "makespan": "the time from the start to the last end",
    "span": "the largest time, over the ranks, from their first start to their last end",
    "bubble": "the share of the makespan in which ranks wait, on average",
    "span bubble": "the same share of the span",
    "idle": "the time of the makespan in which a rank does not compute, per rank",
    "digest": (
        "SHA-256 of what the ranks do, in which order; two schedules that do the same have the same, whatever"
        " their names"
    ),
    "no deadlock": "how it has been proved to run to its end",
    "by data dependencies": "without messages: nothing is computed from what comes later",
    "rendezvous": "even where a send waits until it is received",
    "one queue per pair of ranks": (
        "even where messages between two ranks move in the order in which they are posted"
    ),
    "slot": "a buffer of a stage for a value, named by instructions as @0, @1, ...",
    "step": "instructions of a rank whose messages are posted together",
    "step-atomic": (
        "whether a barrier may stand between any two steps: none needs anything from a later step of another"
        " rank"
    ),
    "refused": "numbers for which the schedule is not defined",
}


def explain(text: str) -> str:
    """Return ``text`` with a line below for each of its words that is known here.

    >>> print(explain("stages 3"))
    stages 3
    <BLANKLINE>
    words
    stage  a part of the model
    """
    words = [word for word in WORDS if re.search(rf"(?<![a-z_-]){word.split(',')[0]}", text)]
    width = max(map(len, words)) + 2
    lines = (
        fill(WORDS[word], 110, initial_indent=word.ljust(width), subsequent_indent=" " * width)
        for word in words
    )
    return "\n".join([text.rstrip("\n"), "", "words", *lines])
