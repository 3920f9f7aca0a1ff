"""What speculation gains: the same requests with and without it, alternating in one engine.

    python bench/speculation.py MODEL [--draft-model MODEL] [--rounds 5] [--threads 2] [--json]

Numbers are decoded tokens per second, medians over the rounds; the ratio is the median of the ratios within a round.
Answers with and without speculation are compared token by token.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from common import median, report

from caudal import LLM, SamplingParams

CODE = '''\
def read_rows(path, separator=",", skip=0):
    """Read a table from a text file and return a list of rows."""
    rows = []
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file):
            if number < skip:
                continue
            line = line.rstrip("\\n")
            if not line:
                continue
            cells = [cell.strip() for cell in line.split(separator)]
            rows.append(cells)
    return rows


def write_rows(path, rows, separator=","):
    """Write a list of rows to a text file."""
    with open(path, "w", encoding="utf-8") as file:
        for cells in rows:
            line = separator.join(str(cell) for cell in cells)
            file.write(line + "\\n")
'''
QUESTIONS = (
    "Explain how rivers shape the land around them.",
    "Write a short story about a lighthouse keeper who finds a letter.",
    "What should I consider before I adopt a dog?",
    "Give me a recipe for vegetable soup, with a list of ingredients.",
    "Why did the Roman Empire fall?",
    "Describe the differences between TCP and UDP.",
    "How do I prepare for a job interview?",
    "Write a poem about the sea in winter.",
)


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    contents: tuple[str, ...]  # what users say; all run at the same time
    params: SamplingParams


def cases(num_tokens: int) -> list[Case]:
    edit = f"Repeat this code exactly, but rename the variable cells to fields:\n```python\n{CODE}```"
    greedy = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    sampled = SamplingParams(temperature=0.7, min_p=0.05, seed=1, max_tokens=num_tokens, ignore_eos=True)
    return [
        Case("edit code, greedy", (edit,), greedy),
        Case("edit code, sampled", (edit,), sampled),
        Case("chat, greedy", QUESTIONS[:1], greedy),
        *(Case(f"chat {i + 1}, sampled", (question,), sampled) for i, question in enumerate(QUESTIONS[:3])),
        Case("4 chats, sampled", QUESTIONS[:4], sampled),
        Case("8 chats, sampled", QUESTIONS, sampled),
    ]


def run(llm: LLM, case: Case, *, speculate: bool) -> tuple[float, list[tuple[int, ...]]]:
    """(decoded tokens per second of all sequences together, their tokens)"""
    from dataclasses import replace

    chats = [[{"role": "user", "content": content}] for content in case.contents]
    results = llm.chat(chats, replace(case.params, speculate=speculate))
    outputs = [result.outputs[0] for result in results]
    times = [output.timings for output in outputs]
    first = min(t.first_token for t in times if t is not None)
    last = max(t.total for t in times if t is not None)
    tokens = [output.token_ids for output in outputs]
    return (sum(map(len, tokens)) - len(tokens)) / (last - first), tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--draft-model")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--tokens", type=int, default=200, help="of each answer")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    method = "draft" if arguments.draft_model else "lookup"
    results: list[dict[str, object]] = []
    with LLM(
        arguments.model, num_threads=arguments.threads, speculation=method, draft_model=arguments.draft_model
    ) as llm:
        for case in cases(arguments.tokens):
            pairs: list[tuple[float, float]] = []
            same = True
            for index in range(arguments.rounds + 1):
                plain, expected = run(llm, case, speculate=False)
                fast, found = run(llm, case, speculate=True)
                same = same and found == expected
                if index:  # the first round fills the prefix cache
                    pairs.append((plain, fast))
            results.append(
                {
                    "case": case.name,
                    "plain": median(plain for plain, _ in pairs),
                    method: median(fast for _, fast in pairs),
                    "ratio": median(fast / plain for plain, fast in pairs),
                    "same": same,
                }
            )
    columns = ("case", "plain", method, "ratio", "same")
    report({"results": results}, as_json=arguments.json, columns=columns, rows=[list(r.values()) for r in results])


if __name__ == "__main__":
    main()
