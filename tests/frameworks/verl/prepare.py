"""Makes the inputs of a run, without a network: a tiny model with random weights, a character tokenizer, and prompts.

prepare.py FOLDER            # a Llama
prepare.py FOLDER --images   # a Qwen2-VL, its processor, and prompts with one image each, of different sizes
"""

import argparse
import io
import string
from pathlib import Path
from typing import Any

import pandas
import torch
import torchvision_on_cpu  # noqa: F401  # before anything imports torchvision
from PIL import Image
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen2VLImageProcessor,
    Qwen2VLProcessor,
    Qwen2VLVideoProcessor,
)

SPECIAL = ["<pad>", "<s>", "</s>", "<unk>"]
VISION = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>", "<|im_end|>"]
TEMPLATE = (
    "{% for m in messages %}{{ m['role'][0] + ':' }}"
    "{% if m['content'] is string %}{{ m['content'] }}"
    "{% else %}{% for part in m['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'a:' }}{% endif %}"
)
SIZES = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
PATCH, MERGED = 14, 2  # pixels per patch, and patches per token, in each direction of an image


def tokenizer() -> PreTrainedTokenizerFast:
    words = SPECIAL + sorted(set(string.printable) - set("\r\x0b\x0c")) + VISION
    inner = Tokenizer(models.WordLevel({word: place for place, word in enumerate(words)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    inner.decoder = decoders.Fuse()
    names = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, chat_template=TEMPLATE, additional_special_tokens=VISION, **names
    )


def save_llama(words: PreTrainedTokenizerFast, ids: dict[str, Any], folder: Path) -> None:
    config = LlamaConfig(tie_word_embeddings=False, **SIZES, **ids)
    LlamaForCausalLM(config).to(torch.float32).save_pretrained(folder)
    words.save_pretrained(folder)


def save_qwen2_vl(words: PreTrainedTokenizerFast, ids: dict[str, Any], folder: Path) -> None:
    token = words.convert_tokens_to_ids
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 1, 1]}
    vision = {"depth": 1, "embed_dim": 32, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 2, "patch_size": PATCH}
    config = Qwen2VLConfig(
        text_config={**SIZES, **ids, "rope_parameters": rope, "tie_word_embeddings": False},
        vision_config={**vision, "spatial_merge_size": MERGED, "temporal_patch_size": 2},
        image_token_id=token("<|image_pad|>"),
        video_token_id=token("<|video_pad|>"),
        vision_start_token_id=token("<|vision_start|>"),
        vision_end_token_id=token("<|vision_end|>"),
        tie_word_embeddings=False,
        **ids,
    )
    Qwen2VLForConditionalGeneration(config).to(torch.float32).save_pretrained(folder)
    shape = {"patch_size": PATCH, "merge_size": MERGED, "size": {"shortest_edge": 56 * 56, "longest_edge": 112 * 112}}
    Qwen2VLProcessor(
        Qwen2VLImageProcessor(**shape), words, Qwen2VLVideoProcessor(**shape), chat_template=TEMPLATE
    ).save_pretrained(folder)


def image(place: int) -> dict[str, bytes]:
    """Return a PNG file of 4, 6 or 9 tokens, with a colour per place."""
    step = PATCH * MERGED
    picture = Image.new("RGB", (step * (2 + place % 2), step * (2 + place // 2 % 2)), (place * 15, 80, 160))
    file = io.BytesIO()
    picture.save(file, "png")
    return {"bytes": file.getvalue()}


def main(folder: Path, images: bool) -> None:
    torch.manual_seed(3)
    words = tokenizer()
    ids = {"pad_token_id": words.pad_token_id, "bos_token_id": words.bos_token_id, "eos_token_id": words.eos_token_id}
    (save_qwen2_vl if images else save_llama)(words, ids, folder / "model")
    for name, count in (("train", 16), ("val", 4)):
        rows = [
            {
                "data_source": "digits",
                "prompt": [{"role": "user", "content": f"{'<image>' * images}{place} and {place * 7 % 10}"}],
                "ability": "digits",
                "reward_model": {"style": "rule", "ground_truth": str(place)},
                "extra_info": {"index": place, "split": name},
                **({"images": [image(place)]} if images else {}),
            }
            for place in range(count)
        ]
        pandas.DataFrame(rows).to_parquet(folder / f"{name}.parquet")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=str(__doc__), formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--images", action="store_true")
    arguments = parser.parse_args()
    main(arguments.folder, arguments.images)
