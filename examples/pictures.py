"""Train a model that sees on questions about made pictures, and score it on pictures it was never shown.

python examples/pictures.py                              # a tiny model from scratch, on a CPU
python examples/pictures.py Qwen/Qwen2.5-VL-3B-Instruct  # a real one (downloaded first, and a GPU)
"""

import sys
import tempfile
from functools import partial
from itertools import islice
from pathlib import Path

import agentenv as ae
from agentenv.training import Callbacks, GRPOConfig, GRPOTrainer, demonstrate
from agentenv_envs import pictures


def main(model: str = "tiny", steps: int = 20, seed: int = 0, warm: int = 300) -> None:
    tiny = model == "tiny"
    spec = ae.spec("agentenv/Pictures-v0")
    limits = ae.RunLimits(max_tokens_per_turn=4 if tiny else 64)
    trainer = GRPOTrainer(
        GRPOConfig(
            model=tiny_model(tempfile.mkdtemp(), seed) if tiny else model,
            max_steps=steps,
            seed=seed,
            groups_per_step=24 if tiny else 8,
            learning_rate=1e-4 if tiny else 2e-6,
            lr_scheduler_type="linear",
            train_vision=tiny,  # a real model's tower sees already; this one has random weights
            eval_tasks=240,  # pictures that never occur in training
            eval_temperature=1.0,
            output_dir=tempfile.mkdtemp(),
        ),
        envs=spec,
        limits=limits,
        runner=ae.RunnerOptions(concurrency=64),
        callbacks=Callbacks(on_scored=partial(show, 0), on_metrics=show),
    )
    if tiny:
        print(f"held out: {trainer.evaluate()['eval/success']:.3f} untouched", flush=True)
        tasks = islice(pictures.tasks("train"), 3200)
        shown = demonstrate(spec, tasks, pictures.oracle, trainer.renderer, limits=limits, seed=seed)
        trainer.warmup(shown, steps=warm, batch_size=32, learning_rate=2e-3, lr_scheduler_type="linear")
    trainer.train()


def show(step: int, metrics: dict[str, float]) -> None:
    if "eval/success" in metrics:
        print(f"held out: {metrics['eval/success']:.3f} after {step} steps of GRPO", flush=True)
    elif step % 10 == 0:
        print(f"step {step}: reward {metrics['reward']:.2f}", flush=True)


def tiny_model(path: str, seed: int) -> str:
    """Write a model of the Qwen3-VL family with random weights and a vocabulary of bytes and questions."""
    import torch
    from tokenizers import AddedToken, Tokenizer
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    from agentenv.render import ChatTokenizer, byte_tokenizer
    from agentenv.training.loop import save_tokenizer

    plain = byte_tokenizer()
    backend = Tokenizer.from_str(plain.backend.to_str())
    marks = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
    backend.add_tokens([AddedToken(mark, special=True, normalized=False) for mark in marks])
    texts = [pictures.asked(question) for question in pictures.QUESTIONS]
    added = [*texts, "user\n", "assistant\n"]
    backend.add_tokens([AddedToken(text, special=False, normalized=False) for text in added])
    start, end, image, video = map(backend.token_to_id, marks)
    config = Qwen3VLConfig(
        text_config={
            "vocab_size": backend.get_vocab_size(with_added_tokens=True),
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "head_dim": 16,
            "max_position_embeddings": 512,
            "initializer_range": 0.08,
            "rope_parameters": {
                "rope_type": "default",
                "mrope_section": [4, 2, 2],
                "mrope_interleaved": True,
                "rope_theta": 10000.0,
            },
        },
        vision_config={
            "depth": 1,
            "hidden_size": 48,
            "intermediate_size": 96,
            "num_heads": 3,
            "out_hidden_size": 64,
            "patch_size": 8,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0],
            "initializer_range": 0.08,
        },
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
        tie_word_embeddings=False,
    )
    torch.manual_seed(seed)
    made = Qwen3VLForConditionalGeneration(config)
    torch.nn.init.normal_(made.model.visual.pos_embed.weight)  # as large as what it is added to
    made.save_pretrained(path)
    tokenizer = ChatTokenizer(
        backend, chat_template=plain.chat_template, special_tokens=plain.special_tokens, name="tiny"
    )
    save_tokenizer(tokenizer, Path(path))
    settings = '{"patch_size": 8, "size": {"shortest_edge": 4096, "longest_edge": 16384}}'
    (Path(path) / "preprocessor_config.json").write_text(settings, encoding="utf-8")
    return path


if __name__ == "__main__":
    main(*sys.argv[1:2], *map(int, sys.argv[2:]))
