"""`PipelineTrainer` beside the `Trainer` of transformers, in one process and in two."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch.distributed import TCPStore

import ppfunc as pp
from tests.scripts import run_script

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from ppfunc.integrations.transformers import PipelineTrainer  # noqa: E402

SCRIPT = Path(__file__).with_name("script.py")
pytestmark = pytest.mark.filterwarnings("default")  # of other libraries

SIZES = {
    "vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2,
    "intermediate_size": 32, "max_position_embeddings": 32,
}  # fmt: skip
NO_DROPOUT = {"hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0}


def llama():
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, pad_token_id=0))


def bert():
    config = transformers.BertConfig(**SIZES, **NO_DROPOUT, num_labels=3)
    return transformers.BertForSequenceClassification(config)


def resnet():  # with running statistics, and parameters of several dimensions
    sizes = {"embedding_size": 4, "hidden_sizes": [4, 8, 8, 8], "depths": [1, 1, 1, 1], "num_labels": 3}
    return transformers.ResNetForImageClassification(transformers.ResNetConfig(**sizes, layer_type="basic"))


def rows(kind, count=22):
    draw = torch.Generator().manual_seed(1)
    if kind is resnet:
        images = torch.randn(count, 3, 16, 16, generator=draw)
        return [{"pixel_values": image, "labels": n % 3} for n, image in enumerate(images)]
    tokens = torch.randint(1, 32, (count, 8), generator=draw)
    if kind is bert:
        return [{"input_ids": row, "labels": int(row[0]) % 3} for row in tokens]
    return [{"input_ids": row, "labels": row} for row in tokens]


class Tempered(PipelineTrainer):
    """A trainer of a user, whose loss reads a number that changes."""

    heat = 1.0

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        logits = model(**inputs).logits / (1 + self.state.global_step)
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return (loss, {"logits": logits}) if return_outputs else loss


def arguments(folder, **more):
    given = {
        "output_dir": str(folder), "max_steps": 4, "per_device_train_batch_size": 2, "use_cpu": True,
        "gradient_accumulation_steps": 4, "learning_rate": 1e-2, "logging_steps": 1, "report_to": [],
        "save_strategy": "no", "disable_tqdm": True, "dataloader_pin_memory": False,
    }  # fmt: skip
    return transformers.TrainingArguments(**given | more)


def trained(trainer):
    trainer.train()
    scores = trainer.evaluate()
    history = [entry for entry in trainer.state.log_history if "loss" in entry]
    return [[entry["loss"], entry["grad_norm"]] for entry in history] + [[scores["eval_loss"]]]


def both(
    kind,
    folder,
    pipelined=PipelineTrainer,
    plain=transformers.Trainer,
    schedule="1f1b",
    callbacks=None,
    **more,
):
    results = []
    for trainer, options in ((plain, {}), (pipelined, {"schedule": schedule, "stages": 4})):
        torch.manual_seed(0)
        data = {"train_dataset": rows(kind), "eval_dataset": rows(kind, 5), "callbacks": callbacks}
        results.append(trained(trainer(kind(), arguments(folder, **more), **data, **options)))
    return results


@pytest.mark.parametrize(
    "kind, schedule, more",
    [
        (llama, "zbv", {"label_smoothing_factor": 0.1, "max_grad_norm": 0.01}),
        (bert, "1f1b", {"optim": "adafactor"}),
        (resnet, "gpipe", {"weight_decay": 0.5}),
        (llama, "chimera", {"bf16": True}),
        (llama, "1f1b", {"activation_checkpointing": True}),
        (llama, pp.one_f_one_b(ranks=4, microbatches=4), {"max_grad_norm": 0}),  # which the last step pads
    ],
    ids=["smoothing", "classes", "statistics", "bfloat16", "checkpointing", "a schedule"],
)
def test_losses_are_those_of_trainer(kind, schedule, more, tmp_path):
    plain, pipelined = both(kind, tmp_path, schedule=schedule, **more)
    tolerance = 2e-2 if "bf16" in more else 1e-6
    for one, other in zip(plain, pipelined, strict=True):
        assert other == pytest.approx(one, abs=tolerance)


def test_a_loss_of_the_user_is_traced_for_the_numbers_that_it_reads(tmp_path):
    class Plain(transformers.Trainer):
        compute_loss = Tempered.compute_loss

    plain, pipelined = both(llama, tmp_path, Tempered, Plain)
    for one, other in zip(plain, pipelined, strict=True):
        assert other == pytest.approx(one, abs=1e-6)


def test_adapters_of_peft(tmp_path):
    peft = pytest.importorskip("peft")

    def adapted():
        return peft.get_peft_model(llama(), peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))

    plain, pipelined = both(adapted, tmp_path)
    for one, other in zip(plain, pipelined, strict=True):
        assert other == pytest.approx(one, abs=1e-6)


def results(printed):
    (line,) = [line for line in printed.splitlines() if line.startswith("RESULT ")]
    return json.loads(line.removeprefix("RESULT "))


def numbers(history):
    return [
        {name: value for name, value in entry.items() if not name.endswith(("runtime", "per_second"))}
        for entry in history
    ]


@pytest.mark.slow
def test_two_processes_train_save_and_resume(fresh, tmp_path, capsys):
    """The second run takes the checkpoint of one process, and one process that of two."""
    from tests.integrations.script import main

    folders = [tmp_path / name for name in ("one", "two")]
    for steps in ("6", "9"):
        main(str(folders[0]), steps)
        alone = results(capsys.readouterr().out)
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # keeps where ranks were
        of_ranks = [
            results(text)
            for text in fresh(2)(run_script, store.port, SCRIPT, str(folders[1]), steps, "zbv", timeout=300)
        ]
        for history, scores, predictions, same in of_ranks:
            assert same
            assert alone[3]
            for one, other in zip(numbers(alone[0]), numbers(history), strict=True):
                assert other == pytest.approx(one, abs=1e-6)
            assert numbers([scores]) == [pytest.approx(numbers([alone[1]])[0], abs=1e-6)]
            assert torch.allclose(torch.tensor(predictions), torch.tensor(alone[2]), atol=1e-5)
        folders.reverse()  # each goes on with what the other has written
    assert {path.name for path in folders[0].glob("checkpoint-*")} == {
        path.name for path in folders[1].glob("checkpoint-*")
    }


def told(rank, size, port, *options):
    """Return what a script raises, and what the error says."""
    try:
        return run_script(rank, size, port, *options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


@pytest.mark.slow
@pytest.mark.parametrize("saves", [False, True])
def test_what_a_callback_raises_is_told_to_the_other_ranks(saves, fresh, store_port, tmp_path):
    options = "3" if saves else "2", "1f1b", "1"
    first, second = fresh(2)(told, store_port, SCRIPT, str(tmp_path), *options, timeout=200)
    assert second == "RuntimeError: no disk"
    assert first.startswith("PipelineError: rank 1 failed outside its program: RuntimeError: no disk")


@pytest.mark.parametrize(
    "more, options, text",
    [
        ({"torch_compile": True}, {}, "torch_compile=True is not for a pipeline; pass engine=ppfunc.engines"),
        ({"fp16_full_eval": True}, {}, "fp16_full_eval=True is not for a pipeline"),
        ({"ddp_bucket_cap_mb": 1}, {}, "ddp_bucket_cap_mb=1 is not for a pipeline; leave it out"),
        ({"auto_find_batch_size": True}, {}, "choose per_device_train_batch_size"),
        ({"optim": "galore_adamw_layerwise"}, {}, "optim='galore_adamw_layerwise' is not for a pipeline"),
        ({"activation_checkpointing_kwargs": {"every_n_layers": 2}}, {}, "activation_checkpointing_kwargs"),
        ({}, {"schedule": "1f2b"}, "unknown schedule '1f2b'"),
        ({}, {"schedule": "inference"}, "inference does not train 4 microbatches"),
        ({}, {"schedule": "seq1f1b"}, "seq1f1b does not train 4 microbatches of whole rows"),
        ({}, {"schedule": "zbv", "stages": 3}, "stages: got 3 in 1 processes"),
        ({"gradient_accumulation_steps": 2}, {"schedule": "dualpipe"}, "gradient_accumulation_steps"),
        ({}, {"schedule": pp.gpipe(2, 8)}, "gpipe does not train 4 microbatches of whole rows: it has 8"),
        ({}, {"schedule": lambda ranks, microbatches: None}, "schedule: got None"),
        ({}, {"stages": 0}, "stages = 0, expected an integer of at least 1"),
        ({}, {"stages": "4"}, "stages = '4', expected an integer"),
    ],
)
def test_what_is_not_honoured_is_refused_by_name(more, options, text, tmp_path):
    with pytest.raises(ValueError) as refused:
        PipelineTrainer(llama(), arguments(tmp_path, **more), **{"schedule": "1f1b", "stages": 4} | options)
    assert text in str(refused.value)


def test_what_is_no_schedule_is_refused_by_name(tmp_path):
    with pytest.raises(TypeError, match="schedule: got 4.*expected a name such as '1f1b'"):
        PipelineTrainer(llama(), arguments(tmp_path), schedule=4)


def test_training_asks_a_loss_of_the_user_for_no_outputs(tmp_path):
    class Plain(transformers.Trainer):
        def compute_loss(self, model, inputs, **others):
            assert not others.get("return_outputs")
            return model(**inputs).loss

    class Pipelined(PipelineTrainer):
        compute_loss = Plain.compute_loss

    losses = []
    for kind, options in ((Plain, {}), (Pipelined, {"stages": 2})):
        torch.manual_seed(0)
        given = arguments(tmp_path, max_steps=2, prediction_loss_only=True)
        losses.append(kind(llama(), given, train_dataset=rows(llama), **options).train().training_loss)
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)


def test_a_loss_that_is_set_on_the_trainer_is_taken(tmp_path):
    losses = []
    for kind, options in ((transformers.Trainer, {}), (PipelineTrainer, {"stages": 2})):
        torch.manual_seed(0)
        trainer = kind(llama(), arguments(tmp_path, max_steps=2), train_dataset=rows(llama), **options)
        trainer.compute_loss = lambda model, inputs, **others: 3 * model(**inputs).loss
        losses.append(trainer.train().training_loss)
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)


class Freezing(transformers.TrainerCallback):
    """Trains another layer from the third step on."""

    def on_step_end(self, args, state, control, model=None, **others):
        for n, layer in enumerate(model.model.layers):
            layer.requires_grad_((n == 1) is (state.global_step > 1))


def test_layers_are_frozen_between_steps(tmp_path):
    plain, pipelined = both(llama, tmp_path, callbacks=[Freezing()])
    for one, other in zip(plain, pipelined, strict=True):
        assert other == pytest.approx(one, abs=1e-6)


class Failing(transformers.TrainerCallback):
    """Raises within a step, once."""

    def on_substep_end(self, args, state, control, **others):
        if state.global_step == 1 and not state.log_history[1:]:
            state.log_history.append({})
            raise KeyError("within a step")


def test_a_step_that_was_interrupted_leaves_nothing_to_the_next(tmp_path):
    results = []
    for kind, options in ((transformers.Trainer, {}), (PipelineTrainer, {"stages": 2})):
        torch.manual_seed(0)
        given = arguments(tmp_path, max_steps=2)
        trainer = kind(llama(), given, train_dataset=rows(llama), callbacks=[Failing()], **options)
        with pytest.raises(KeyError, match="within a step"):
            trainer.train()
        trainer.pop_callback(Failing)
        results.append(trainer.train().training_loss)
    assert results[0] == pytest.approx(results[1], abs=1e-6)


def test_dropout_draws_the_same_numbers_when_a_run_is_resumed(tmp_path):
    def dropping():
        torch.manual_seed(0)
        config = transformers.BertConfig(**SIZES, num_labels=3)
        return transformers.BertForSequenceClassification(config)

    losses = []
    for resume in (None, str(tmp_path / "checkpoint-2")):
        given = arguments(tmp_path, save_strategy="steps", save_steps=2)
        trainer = PipelineTrainer(dropping(), given, train_dataset=rows(bert), stages=2)
        trainer.train(resume_from_checkpoint=resume)
        losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    assert losses[0] == losses[1]
    plain = transformers.Trainer(dropping(), arguments(tmp_path), train_dataset=rows(bert))
    plain.train()
    assert [entry["loss"] for entry in plain.state.log_history[:-1]] == pytest.approx(losses[0], rel=0.2)


def test_batches_of_a_step_with_unlike_inputs_are_refused(tmp_path):
    data = [row | ({"attention_mask": torch.ones(8)} if n < 4 else {}) for n, row in enumerate(rows(llama))]
    given = arguments(tmp_path, train_sampling_strategy="sequential")
    with pytest.raises(ValueError, match="batches of a step: got attention_mask in some alone"):
        PipelineTrainer(llama(), given, train_dataset=data, stages=2).train()


def test_an_optimizer_that_computes_losses_is_refused(tmp_path):
    model = llama()
    with pytest.raises(ValueError, match="optimizers: got LBFGS"):
        PipelineTrainer(model, arguments(tmp_path), optimizers=(torch.optim.LBFGS(model.parameters()), None))


def test_a_model_with_nothing_to_train_is_refused(tmp_path):
    trainer = PipelineTrainer(llama().requires_grad_(False), arguments(tmp_path), train_dataset=rows(llama))
    with pytest.raises(ValueError, match="model: got frozen parameters alone"):
        trainer.train()


def test_a_step_of_the_user_that_would_not_run_the_stages_is_refused(tmp_path):
    class Whole(PipelineTrainer):
        def training_step(self, model, inputs, num_items_in_batch=None):
            return self.compute_loss(model, inputs)

    class Counting(PipelineTrainer):
        def training_step(self, *args, **kwargs):
            return super().training_step(*args, **kwargs)

    Counting(llama(), arguments(tmp_path))
    with pytest.raises(TypeError, match=r"Whole.training_step does not call super\(\).training_step"):
        Whole(llama(), arguments(tmp_path))
