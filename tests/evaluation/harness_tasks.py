"""Small tasks of lm-eval's four output types, on text like the tiny run's."""

import json
import random
from pathlib import Path

WORDS = [f"{stem}{end}" for stem in ("ar", "ben", "cor", "dal", "em") for end in ("a", "io", "um", "ette")]


def words(rng: random.Random, count: int) -> str:
    return " ".join(rng.choices(WORDS, k=count))


def write_tasks(folder: Path, documents: int = 12, generated_tokens: int = 20) -> list[str]:
    """Write six tasks as YAML files with their data; return their names."""
    rng = random.Random(0)
    folder.mkdir(parents=True, exist_ok=True)
    choices = (
        "doc_to_text: '{{question}}'\ndoc_to_choice: '{{choices}}'\ndoc_to_target: gold\noutput_type: multiple_choice"
    )
    metrics = "metric_list:\n  - metric: acc\n  - metric: acc_norm\n"
    tasks = {
        "tiny_choice": (choices, metrics),
        "tiny_letters": (choices, metrics),
        "tiny_empty_context": (choices.replace("{{question}}", ""), metrics),
        "tiny_last_word": (
            "doc_to_text: '{{question}}'\ndoc_to_target: '{{answer}}'\noutput_type: loglikelihood",
            "metric_list:\n  - metric: perplexity\n  - metric: acc\n",
        ),
        "tiny_text": (
            "doc_to_text: ''\ndoc_to_target: '{{text}}'\noutput_type: loglikelihood_rolling",
            "metric_list:\n  - metric: word_perplexity\n  - metric: bits_per_byte\n",
        ),
        "tiny_generation": (
            "doc_to_text: '{{question}}'\ndoc_to_target: '{{answer}}'\noutput_type: generate_until\n"
            f"generation_kwargs:\n  until: ['a']\n  max_gen_toks: {generated_tokens}\n  do_sample: false",
            "metric_list:\n  - metric: exact_match\n",
        ),
    }
    for name, (body, metric_list) in tasks.items():
        rows = []
        for number in range(documents):
            letters = name == "tiny_letters"
            answers = list("ABCD") if letters else [" " + words(rng, rng.randint(1, 3)) for _ in range(4)]
            rows.append(
                {
                    # Some questions are longer than the model reads.
                    "question": f"{number} " + words(rng, 16 if number % 4 == 3 else rng.randint(1, 5)),
                    "choices": answers,
                    "gold": rng.randrange(4),
                    "answer": " " + words(rng, 1),
                    "text": words(rng, 5 * (number + 1)) if number else "é ü",
                }
            )
        data = folder / f"{name}.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        (folder / f"{name}.yaml").write_text(
            f"task: {name}\ndataset_path: json\ndataset_kwargs:\n  data_files: {{test: {data}}}\ntest_split: test\n"
            f"target_delimiter: ''\n{body}\n{metric_list}"
        )
    return list(tasks)
