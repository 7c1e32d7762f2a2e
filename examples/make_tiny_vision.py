"""Train the tiny vision-language model of examples/tiny-vision to say what it sees.

Usage: python examples/make_tiny_vision.py OUT_DIR [--steps N N N]

The model is a Qwen2-VL of less than one and a half million parameters. It names the coloured shapes of pictures and how
one moves in a short video, so that an answer can be right or wrong, and knows a few sentences of plain text. Nothing is
fetched: shapes.py draws the pictures and make_tiny.py makes the text up, the same for the same seed; lessons.py makes
chats of both. It needs torch 2.9 or later (for Muon), torchvision, transformers, tokenizers, jinja2 and pillow.
"""

import argparse
import json
import time
from pathlib import Path

import torch
from lessons import (
    CHAT_TEMPLATE,
    CONTEXT,
    FRAMES_PER_PATCH,
    IGNORED,
    IMAGE_PAD,
    MERGE,
    NAMES,
    VIDEO_PAD,
    VISION_END,
    VISION_PAD,
    VISION_START,
    VOCAB_SIZE,
    Batch,
    Teacher,
    make_tokenizer,
    render,
)
from shapes import ORDINALS
from torch.nn.functional import cross_entropy
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen2VLImageProcessor,
    Qwen2VLProcessor,
    Qwen2VLVideoProcessor,
)

SEED = 21
# Kinds of examples, with how many of each a step takes: for the vision tower alone, for both, and of all that is asked.
PLANS = (
    {"small picture": 24, "clip": 8},
    {"small picture": 16, "clip": 4, "text": 8},
    {"picture": 16, "pictures": 8, "video": 4, "text": 8},
)
STEPS = 1600, 300, 1100
RATES = (4e-3, 0.0, 3e-3), (2e-3, 1e-2, 3e-3), (2e-3, 6e-3, 3e-3)
MEASURED = {"picture": 500, "pictures": 300, "video": 300}  # kinds of prompts, with how many are asked in the end
PATCH = 14  # its side in pixels
CELL = PATCH * MERGE  # the side of what becomes one token
LIMITS = {
    "shortest_edge": 16 * CELL**2,
    "longest_edge": 64 * CELL**2,
}  # of a picture or a frame: pixels, in spite of the names


def make_processor(tokenizer: PreTrainedTokenizerFast) -> Qwen2VLProcessor:
    """Return the processor of pictures and videos; both have the same limits, for a frame as for a picture."""
    common = {"patch_size": PATCH, "merge_size": MERGE, "temporal_patch_size": FRAMES_PER_PATCH}
    return Qwen2VLProcessor(
        image_processor=Qwen2VLImageProcessor(size=dict(LIMITS), **common),
        tokenizer=tokenizer,
        video_processor=Qwen2VLVideoProcessor(size=dict(LIMITS), cap_pixels_per_frame=False, **common),
        chat_template=CHAT_TEMPLATE,
    )


def make_model(tokenizer: PreTrainedTokenizerFast) -> Qwen2VLForConditionalGeneration:
    """Return the untrained model."""
    torch.manual_seed(SEED)
    ids = {
        name: tokenizer.convert_tokens_to_ids(token)
        for name, token in (
            ("vision_start_token_id", VISION_START),
            ("vision_end_token_id", VISION_END),
            ("vision_token_id", VISION_PAD),
            ("image_token_id", IMAGE_PAD),
            ("video_token_id", VIDEO_PAD),
        )
    }
    ends = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    # Heads of 64, because not all attention kernels for GPUs take smaller ones.
    text = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        **ends,
        "rope_parameters": {"rope_type": "default", "mrope_section": [8, 12, 12], "rope_theta": 10000.0},
    }
    vision = {
        "depth": 3,
        "embed_dim": 128,
        "hidden_size": 128,
        "num_heads": 2,
        "mlp_ratio": 2,
        "in_channels": 3,
        "patch_size": PATCH,
        "spatial_merge_size": MERGE,
        "temporal_patch_size": FRAMES_PER_PATCH,
    }
    return Qwen2VLForConditionalGeneration(
        Qwen2VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=True, **ids, **ends)
    )


class Trainer:
    """The model with what is needed to train it."""

    def __init__(self, model: Qwen2VLForConditionalGeneration, processor: Qwen2VLProcessor) -> None:
        """Start with an untrained model."""
        self.model, self.processor, self.teacher = model, processor, Teacher(SEED)
        # What the vision tower is to tell the language model, as a task of its own, which makes it learn far sooner:
        # where the shapes are, their colours and kinds. So is for the first layer of the language model which picture
        # a token belongs to or is about. These heads are thrown away.
        self.cell_head = torch.nn.Linear(model.config.vision_config.hidden_size, sum(NAMES))
        self.place_head = torch.nn.Linear(model.config.text_config.hidden_size, len(ORDINALS))
        # The patches' convolution is a matrix product, which is faster and can be left to Muon; the memory is the same.
        self.patch_embed = model.model.visual.patch_embed
        self.patch_matrix = torch.nn.Parameter(self.patch_embed.proj.weight.detach().flatten(1))
        self.patch_embed.forward = lambda pixels: pixels @ self.patch_matrix.T

    def loss(self, batch: Batch, *, answers: bool) -> torch.Tensor:
        """Return the loss of a batch's cells, or of its answers with a share of that."""
        seen, loss = {}, torch.zeros(())
        for name, pixels, features in (
            ("image", "pixel_values", self.model.get_image_features),
            ("video", "pixel_values_videos", self.model.get_video_features),
        ):
            if pixels in batch.inputs:
                seen[name] = features(batch.inputs[pixels], batch.inputs[f"{name}_grid_thw"])
                loss = loss + self.cell_loss(torch.cat(seen[name].pooler_output), batch.cells(videos=name == "video"))
        if not answers:
            return loss
        grids = {name: grid for name, grid in batch.inputs.items() if name.endswith("_grid_thw")}
        told = self.model(
            input_ids=batch.ids,
            mm_token_type_ids=batch.types,
            mm_encoder_outputs=seen,
            use_cache=False,
            output_hidden_states=True,
            **grids,
        )
        if seen:
            places = self.place_head(told.hidden_states[1])
            loss = loss + cross_entropy(places.flatten(0, 1), batch.places.flatten(), ignore_index=IGNORED)
        losses = cross_entropy(told.logits[:, :-1].flatten(0, 1), batch.ids[:, 1:].flatten(), reduction="none")
        wanted = batch.weights[:, 1:].flatten()
        return 0.3 * loss + (losses * wanted).sum() / wanted.sum()

    def cell_loss(self, embeddings: torch.Tensor, names: torch.Tensor) -> torch.Tensor:
        """Return the loss of what the embeddings of pictures say of their cells."""
        scores = self.cell_head(embeddings).split(NAMES, 1)
        return sum(cross_entropy(classes, wanted) for classes, wanted in zip(scores, names, strict=True))

    def train(self, plan: dict[str, int], steps: int, rates: tuple[float, float, float], *, answers: bool) -> None:
        """Take steps, each over a batch of every kind in the plan; without `answers`, for the vision tower alone.

        The rates are those of the matrices of the tower, of those of the language model, and of everything else.
        """
        named = [(name, weight) for name, weight in self.model.named_parameters() if "patch_embed" not in name]
        matrices = [(name, weight) for name, weight in named if weight.ndim == 2 and "embed_tokens" not in name]
        tower = [self.patch_matrix, *(weight for name, weight in matrices if ".visual." in name)]
        language = [weight for name, weight in matrices if ".visual." not in name]
        # Muon is made for matrices between layers; the embedding, norms and biases are left to AdamW.
        others = [weight for name, weight in named if weight.ndim != 2 or "embed_tokens" in name]
        groups = [{"params": tower, "lr": rates[0]}, {"params": language, "lr": rates[1]}]
        rest = [*others, *self.cell_head.parameters(), *self.place_head.parameters()]
        optimizers = (
            torch.optim.Muon(groups, weight_decay=0.02, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(rest, lr=rates[2], betas=(0.9, 0.98), weight_decay=0.0),
        )

        def rate(step: int) -> float:
            return min(1.0, (step + 1) / 30, (steps - step) / steps * 1.5)

        schedules = [torch.optim.lr_scheduler.LambdaLR(optimizer, rate) for optimizer in optimizers]
        for step in range(steps):
            for part in (self.model, self.cell_head, self.place_head):
                part.zero_grad()
            self.patch_matrix.grad = None
            losses = []
            for kind, rows in plan.items():
                loss = self.loss(Batch(self.processor, self.teacher.examples(kind, rows)), answers=answers)
                loss.backward()
                losses.append(loss.item())
            torch.nn.utils.clip_grad_norm_([*tower, *language, *others], 1.0)
            for rule in (*optimizers, *schedules):
                rule.step()
            if step % 50 == 0:
                shown = ", ".join(f"{kind} {loss:.3f}" for kind, loss in zip(plan, losses, strict=True))
                print(f"step {step}: {time.process_time():.0f} s, loss of {shown}", flush=True)


def accuracy(model: Qwen2VLForConditionalGeneration, processor: Qwen2VLProcessor, kind: str, count: int) -> float:
    """Return which share of the model's most probable answers is right, about media that it was not trained on."""
    teacher, right = Teacher(SEED + 1), 0
    with torch.no_grad():
        for _ in range(count // 20):
            batch = Batch(processor, teacher.examples(kind, 20))
            scores = model(input_ids=batch.ids, mm_token_type_ids=batch.types, use_cache=False, **batch.inputs).logits
            # An answer is right if each of its tokens is the most probable one after those before it.
            same = scores[:, :-1].argmax(-1) == batch.ids[:, 1:]
            right += int((same | (batch.weights[:, 1:] == 0)).all(1).sum())
    return right / (count // 20 * 20)


def save(out_dir: Path, model: Qwen2VLForConditionalGeneration, processor: Qwen2VLProcessor) -> None:
    """Write the folder as Qwen's own models have it."""
    tokenizer = processor.tokenizer
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=[tokenizer.eos_token_id, tokenizer.bos_token_id],
    )
    model.save_pretrained(out_dir)
    tokenizer.save_pretrained(out_dir)
    config = json.loads((out_dir / "config.json").read_text())
    config["vision_config"]["in_chans"] = config["vision_config"]["in_channels"]  # SGLang's name for it
    common = {
        "processor_class": type(processor).__name__,
        "min_pixels": LIMITS["shortest_edge"],
        "max_pixels": LIMITS["longest_edge"],
        "patch_size": PATCH,
        "merge_size": MERGE,
        "temporal_patch_size": FRAMES_PER_PATCH,
        "image_mean": processor.image_processor.image_mean,
        "image_std": processor.image_processor.image_std,
    }
    video = {"video_processor_type": type(processor.video_processor).__name__, "cap_pixels_per_frame": False}
    files = {
        "config.json": config,
        "preprocessor_config.json": {"image_processor_type": type(processor.image_processor).__name__, **common},
        "video_preprocessor_config.json": {**video, **common},
    }
    for name, content in files.items():
        (out_dir / name).write_text(json.dumps(content, indent=2) + "\n")
    for path in out_dir.iterdir():
        # The weights are written for their owner alone, and others are to read them.
        path.chmod(0o644)


def answer(model: Qwen2VLForConditionalGeneration, processor: Qwen2VLProcessor, question: str, **media: list) -> str:
    """Return the model's most probable answer."""
    kinds = [{"type": kind[:-1]} for kind, items in media.items() for _ in items]
    content = [*kinds, {"type": "text", "text": question}]
    prompt = render(messages=[{"role": "user", "content": content}], add_generation_prompt=True)
    inputs = processor(text=[prompt], return_tensors="pt", **media)
    tokens = model.generate(**inputs, max_new_tokens=100, do_sample=False)
    return processor.decode(tokens[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def main() -> None:
    """Make the folder named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out_dir", type=Path)
    parser.add_argument("--steps", type=int, nargs=3, default=STEPS)
    options = parser.parse_args()
    # One thread adds up in one order, so that on one machine every run ends at the same weights.
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    teacher = Teacher(SEED)
    texts = [example.text for kind in PLANS[-1] for example in teacher.examples(kind, 300)]
    tokenizer = make_tokenizer(texts)
    processor, model = make_processor(tokenizer), make_model(tokenizer)
    print(f"{sum(weight.numel() for weight in model.parameters())} parameters", flush=True)
    trainer = Trainer(model, processor)
    for place, (plan, steps, rates) in enumerate(zip(PLANS, options.steps, RATES, strict=True)):
        trainer.train(plan, steps, rates, answers=place > 0)
    save(options.out_dir, model.to(torch.bfloat16), processor)
    print(f"{time.process_time():.0f} s of one core")
    # What is measured is what was written.
    model = Qwen2VLForConditionalGeneration.from_pretrained(options.out_dir, dtype=torch.bfloat16)
    processor = Qwen2VLProcessor.from_pretrained(options.out_dir)
    for kind, count in MEASURED.items():
        print(f"{accuracy(model, processor, kind, count):.1%} of {count} answers right about: {kind}")
    for question in ("Hello", "What is the capital of Japan?", "What do you see?"):
        print(f"{question}\n  {answer(model, processor, question)}")


if __name__ == "__main__":
    main()
