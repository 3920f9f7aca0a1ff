"""How byte-level BPE vocabularies cut text into words before merging: GGUF's `tokenizer.ggml.pre` names.

GGUF stores only a name; the rule behind it is in the `tokenizer.json` of the model it was made for. The regular
expressions here are those public ones, in Oniguruma's syntax. They are applied one after another: each cuts the
pieces left by the one before it into its matches and the text between them.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from caudal.core import UnsupportedModelError


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """One rule: `patterns` in the order in which they are applied."""

    patterns: tuple[str, ...]
    ignore_merges: bool = False  # a word that is a token as it stands is not built from merges
    add_bos: bool = False  # the default where the file does not say


_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _SPACES
_QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _SPACES
_QWEN35 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|" + _SPACES
_SEED = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}\r\n]+|" + _SPACES
_BAILING = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
# Words of one case pattern ("camelCase" is two): Mistral's tekken and OpenAI's o200k.
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
_PUNCTUATION_OR_SLASH = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_TEKKEN = "|".join((*_CASED, r"\p{N}", _PUNCTUATION_OR_SLASH, _SPACES))
_O200K = "|".join((*(words + _CONTRACTIONS + "?" for words in _CASED), r"\p{N}{1,3}", _PUNCTUATION_OR_SLASH, _SPACES))
_CJK = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_DEEPSEEK_V3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|" + _SPACES
)
# The letters that have upper and lower case, as the file of DeepSeek LLM lists them.
_CASED_LETTERS = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373"
    "\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    "\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-"
    "\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec"
    "\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-"
    "\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3"
    "\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17"
    "\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-"
    "\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)

_DIGITS = r"\p{N}"

_RULES: dict[PreTokenizer, tuple[str, ...]] = {
    PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")): ("default",),
    PreTokenizer((_GPT2,)): (
        *("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "granite-docling", "exaone4", "gigachat", "a.x-4.0"),
        *("mellum", "modern-bert", "roberta-bpe", "jina-es", "jina-de"),
        *("jina-v1-en", "jina-v2-es", "jina-v2-de", "jina-v2-code"),
    ),
    PreTokenizer((_DIGITS, _GPT2)): (
        *("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2"),
    ),
    PreTokenizer((_LLAMA3,), ignore_merges=True, add_bos=True): (
        *("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano"),
    ),
    PreTokenizer((_LLAMA3,)): ("dbrx", "smaug-bpe", "chatglm-bpe"),
    PreTokenizer((_LLAMA3,), ignore_merges=True): ("glm4", "glm5"),
    PreTokenizer((_QWEN2,)): (
        *("qwen2", "stablelm2", "deepseek-r1-qwen", "megrez", "hunyuan", "solar-open", "grok-2", "kormo", "f2llmv2"),
    ),
    PreTokenizer((r"[^\n]+|\n+", _QWEN2)): ("laguna",),
    PreTokenizer((_QWEN35,)): ("qwen35",),
    PreTokenizer((_SEED,)): ("seed-coder",),
    PreTokenizer((_BAILING,)): ("bailingmoe", "bailingmoe2", "llada-moe"),
    PreTokenizer((r"\p{N}{1,3}", _LLAMA3), ignore_merges=True): ("minicpm5",),
    PreTokenizer((_TEKKEN,), ignore_merges=True, add_bos=True): ("tekken",),
    PreTokenizer((_O200K,)): ("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"),
    PreTokenizer((r"\p{N}{1,3}", _CJK, _DEEPSEEK_V3)): ("deepseek-v3", "hunyuan-dense", "hy_v4", "joyai-llm"),
    PreTokenizer(
        (
            r"[\r\n]",
            rf"\s?[{_CASED_LETTERS}]+",
            "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
            r"\s+$",
            "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+",
            r"\p{N}+",
        )
    ): ("deepseek-llm",),
    PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+", _DIGITS)): (
        "deepseek-coder",
    ),
    PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")): ("falcon",),
}
PRE_TOKENIZERS: dict[str, PreTokenizer] = {name: rule for rule, names in _RULES.items() for name in names}


def pre_tokenizer(name: str) -> PreTokenizer:
    """The rule that a GGUF file calls `name`. Raises UnsupportedModelError for a name that Caudal does not know."""
    rule = PRE_TOKENIZERS.get(name)
    if rule is None:
        nearest = difflib.get_close_matches(name, PRE_TOKENIZERS, n=1, cutoff=0.0)[0]
        raise UnsupportedModelError(
            f"the model's pre-tokenizer {name!r} (tokenizer.ggml.pre) is not supported; "
            f"the nearest supported one is {nearest!r}. Its text would be cut into the wrong tokens, so it is refused."
        )
    return rule
