"""A script of a user of transformers: ``script.py FOLDER STEPS``, with a schedule in a pipeline.

With a third option the callback of that rank raises after the last step.
"""

import json
import os
import sys

import torch
import transformers

from ppfunc.integrations.transformers import PipelineTrainer


def model_of():
    torch.manual_seed(0)
    sizes = {"n_layer": 4, "n_embd": 16, "n_head": 2, "vocab_size": 32, "n_positions": 16}
    drops = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
    config = transformers.GPT2Config(**sizes, **drops, bos_token_id=0, eos_token_id=0)
    return transformers.GPT2LMHeadModel(config)


def rows(count):
    tokens = torch.randint(32, (count, 8), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row} for row in tokens]


def accuracy(prediction):
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


class Failing(transformers.TrainerCallback):
    def on_step_end(self, args, state, control, **others):
        if state.global_step == state.max_steps:
            raise RuntimeError("no disk")


def main(folder, steps, schedule=None, fails=None):
    args = transformers.TrainingArguments(
        output_dir=folder, max_steps=int(steps), per_device_train_batch_size=2, gradient_accumulation_steps=4,
        learning_rate=1e-2, warmup_steps=2, weight_decay=0.1, lr_scheduler_type="constant_with_warmup",
        logging_steps=1, eval_strategy="steps", eval_steps=3, save_steps=3, save_total_limit=2,
        load_best_model_at_end=True, report_to=[], use_cpu=True, disable_tqdm=True,
        dataloader_pin_memory=False,
    )  # fmt: skip
    data = {"train_dataset": rows(22), "eval_dataset": rows(5), "compute_metrics": accuracy}
    if schedule is None:
        trainer = transformers.Trainer(model_of(), args, **data)
    else:
        trainer = PipelineTrainer(model_of(), args, **data, schedule=schedule)
    if fails is not None and fails == os.environ["RANK"]:
        trainer.add_callback(Failing())
    trainer.train(resume_from_checkpoint=int(steps) > 6)
    scores = trainer.evaluate(), trainer.predict(rows(3)).predictions.tolist()
    trainer.save_model(folder)
    read = transformers.GPT2LMHeadModel.from_pretrained(folder)
    same = all(torch.equal(p, q) for p, q in zip(read.parameters(), trainer.model.parameters(), strict=True))
    print("RESULT", json.dumps([trainer.state.log_history, *scores, same]))


if __name__ == "__main__":
    main(*sys.argv[1:])
