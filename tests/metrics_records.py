"""Records of a metrics.jsonl, written by hand."""


def evaluation(tokens, loss):
    return {"kind": "evaluation", "tokens": tokens, "step": tokens // 2048, "loss": loss}


def preview(tokens, recipe, loss):
    return {"kind": "preview", "tokens": tokens, "step": tokens // 2048, "recipe": recipe, "loss": loss}
