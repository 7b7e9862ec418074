"""Makes what a run needs, without a network: a tiny Llama of random numbers, a tokenizer of characters, and prompts."""

import string
import sys
from pathlib import Path

import pandas
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SPECIAL = ["<pad>", "<s>", "</s>", "<unk>"]
TEMPLATE = (
    "{% for m in messages %}{{ m['role'][0] + ':' + m['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'a:' }}{% endif %}"
)


def tokenizer() -> PreTrainedTokenizerFast:
    words = SPECIAL + sorted(set(string.printable) - set("\r\x0b\x0c"))
    inner = Tokenizer(models.WordLevel({word: place for place, word in enumerate(words)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    inner.decoder = decoders.Fuse()
    names = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=inner, chat_template=TEMPLATE, **names)


def main(folder: Path) -> None:
    torch.manual_seed(3)
    words = tokenizer()
    ids = {"pad_token_id": words.pad_token_id, "bos_token_id": words.bos_token_id, "eos_token_id": words.eos_token_id}
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        **ids,
    )
    LlamaForCausalLM(config).to(torch.float32).save_pretrained(folder / "model")
    words.save_pretrained(folder / "model")
    for name, count in (("train", 16), ("val", 4)):
        rows = [
            {
                "data_source": "digits",
                "prompt": [{"role": "user", "content": f"{place} and {place * 7 % 10}"}],
                "ability": "digits",
                "reward_model": {"style": "rule", "ground_truth": str(place)},
                "extra_info": {"index": place, "split": name},
            }
            for place in range(count)
        ]
        pandas.DataFrame(rows).to_parquet(folder / f"{name}.parquet")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
