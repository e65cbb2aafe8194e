"""Train a classifier of Hugging Face's transformers, which returns the loss itself, in a loop as their Trainer's.

torchrun --standalone --nproc-per-node 2 examples/huggingface.py
"""

import torch
from torch.utils.data import DataLoader
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    default_data_collator,
    get_linear_schedule_with_warmup,
)

import splitc

EPOCHS, BATCH, TIME = 4, 16, 24  # examples of a batch on each process; tokens


def sentences(number: int, seed: int) -> list[dict[str, torch.Tensor]]:
    """Random tokens, and whether the most frequent kind is the even or the odd ones."""
    tokens = torch.randint(0, 40, (number, TIME), generator=torch.Generator().manual_seed(seed))
    labels = (tokens % 2).sum(1) > TIME // 2
    mask = torch.ones_like(tokens)
    return [{"input_ids": tokens[k], "attention_mask": mask[k], "label": labels[k].long()} for k in range(number)]


def main() -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}
    model = BertForSequenceClassification(
        BertConfig(vocab_size=40, max_position_embeddings=TIME, num_labels=2, **sizes)
    )
    train = DataLoader(sentences(1024, 0), BATCH, shuffle=True, drop_last=True, collate_fn=default_data_collator)

    worker, train = splitc.prepare(model, lambda p: torch.optim.AdamW(p, lr=2e-3), None, train, clip_norm=1.0)
    test = worker.loader(sentences(200, 1), shuffle=False, drop_last=False, collate_fn=default_data_collator)
    steps = EPOCHS * len(train)
    scheduler = worker.scheduler(lambda optimizer: get_linear_schedule_with_warmup(optimizer, steps // 10, steps))

    for epoch in range(EPOCHS):
        for batch in train:
            loss = worker.step(*batch)
            scheduler.step()
        right = torch.zeros((), device=worker.device)
        for batch in test:
            if (output := worker.predict(*batch)) is not None:
                *_, labels = batch
                right += (output.logits.argmax(1) == labels.to(worker.device)).sum()
        torch.distributed.all_reduce(right)
        if worker.rank.index == 0:
            print(f"epoch {epoch}: loss {loss:.3f}, accuracy {right / 200:.3f}")


if __name__ == "__main__":
    main()
