"""Two examples for every command, shown by its --help; a test checks that they are accepted."""

EXAMPLES = {
    "train": (
        "--config configs/demo.yaml",
        "data.train=/data/persian data.language=fa run=runs/fa --data-gpu 0 --model-gpu 1",
    ),
    "finetune": (
        "finetune recordings/ --weights pretrained/ --language fa --out my_voice/",
        "finetune recordings/ --language fa --recogniser whisper-large-v3/ --out my_voice/",
    ),
    "trainer": (
        "trainer --run runs/fa --replace",
        "trainer --run runs/fa --rank 1 --model-gpu 0",
    ),
    "producer": (
        "producer --run runs/fa --gpu 2",
        "producer --bundle fa.bundle --connect tcp://host:5555 --data-root /data/persian",
    ),
    "bundle": ("bundle --run runs/fa", "bundle --run runs/fa --out fa.bundle"),
    "scan": (
        "scan data.train=/data/persian data.language=fa",
        "scan --train-data /data/persian --strict --html report.html",
    ),
    "split": ("split recordings/ --out clips/", "split interviews/ --max-seconds 9"),
    "transcribe": (
        "transcribe recordings/ --language fa --model whisper-large-v3/",
        "transcribe clips/ --model whisper-small/",
    ),
    "check": ("check", "check --data-gpu 0 --model-gpu 1"),
    "profile": ("profile --run runs/fa", "profile --run runs/fa --steps 300 --json"),
    "status": ("status --run runs/fa --watch", "status --run runs/fa --json"),
    "stop": ("stop --run runs/fa", "stop run=runs/fa"),
    "serve": ("serve --run runs/fa", "serve --run runs/fa --host 0.0.0.0 --port 8080"),
    "report": ("report --run runs/fa", "report --compare runs/a runs/b --out comparison.html"),
    "config": ("config train.optim.learning_rate", "config train samples.texts"),
    "synthesize": (
        "synthesize --run runs/fa --text سلام --language fa --reference voice.wav --out out.wav",
        "synthesize --weights pretrained --text Hello. --reference voice.wav --out out.wav",
    ),
    "import-coqui": (
        "import-coqui --model model.pth --vocab vocab.json --dvae dvae.pth --out pretrained",
        "import-coqui --model XTTS/ --out pretrained",
    ),
    "export-coqui": (
        "export-coqui --run runs/fa --out exported",
        "export-coqui --run runs/fa --step newest --out exported",
    ),
}
