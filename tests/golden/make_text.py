"""Makes text.json: what Coqui's VoiceBpeTokenizer makes of the sentences in text_sentences.py.

    python -P tests/golden/make_text.py path/to/xtts_vocab.json

in an environment with coqui-tts 0.28.0 (num2words 0.5.14), pypinyin 0.55, cutlet 0.5.2, fugashi, unidic-lite and ko-speech-tools. The
vocabulary is XTTS's first one; languages that it has no tag for get no ids. `error` names the exception where Coqui raises one.
"""

import json
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
import coqui_stubs  # noqa: E402

coqui_stubs._STUBS.discard("unidic")  # absent here: fugashi then takes unidic-lite, which a stand-in would prevent
from text_sentences import SENTENCES  # noqa: E402
from TTS.tts.layers.xtts.tokenizer import VoiceBpeTokenizer  # noqa: E402

tokenizer = VoiceBpeTokenizer(sys.argv[1])
tags = tokenizer.tokenizer.get_vocab()
rows = []
for language, sentences in SENTENCES.items():
    for sentence in sentences:
        row = {"language": language, "text": sentence}
        try:
            row["clean"] = tokenizer.preprocess_text(sentence, language)
            if f"[{'zh-cn' if language == 'zh' else language}]" in tags:
                row["ids"] = tokenizer.encode(sentence, language)
        except Exception as error:
            row["error"] = type(error).__name__
        rows.append(row)
lines = ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
(HERE / "text.json").write_text(f"[\n{lines}\n]\n", encoding="utf-8")
print(len(rows), "sentences,", sum("error" in row for row in rows), "errors")
