"""Text below the help of each command: examples to copy, and notes."""

from __future__ import annotations

EXAMPLES = {
    "demo": """examples:
  fedfm demo                                           five runs and their table, in runs/demo-<time>/
  fedfm demo --out mine --seed 1
""",
    "run": """examples:
  fedfm run exp.toml                                   run an experiment; the report is in runs/<name>-<time>/
  fedfm run exp.toml --set method.rounds=5 --set run.seed=1
  fedfm run exp.toml --engine deployment               SuperLink and SuperNodes on loopback, TLS, fresh keys
  fedfm run exp.toml --seeds 0,1,2                     each seed, then mean and 95 % interval
  fedfm run exp.toml --tune 0.01,0.03,0.1              choose the learning rate by validation rows first
  fedfm run exp.toml --format json | tail -1           the result as one JSON object

an experiment:
  [data]
  name = "digits"
  partition = { name = "dirichlet", alpha = 0.1, clients = 10 }
  [model]
  name = "nano-vit"
  adaptation = { name = "lora", rank = 4 }
  [method]
  name = "fedavg"
  rounds = 10
""",
    "pretrain": """examples:
  fedfm pretrain vit.toml --out secret                 train it; one line an epoch, with metrics on held-out rows
  fedfm pretrain vit.toml --out secret                 the same command continues after a kill, with the same bits
  fedfm pretrain vit.toml --out secret --set pretrain.local.epochs=5
  fedfm run exp.toml --set model.name=secret           an experiment starts from it
  fedfm run exp.toml --set method.foundation=secret    a method keeps it at the server

a pretraining: all rows in one place, all parameters trained, images unchanged (no augmentation):
  [data]
  path = "tiny_imagenet.npz"
  [model]
  name = "preact-resnet"                               # or "nano-vit", "vit-b16", "nano-gpt2", a folder, a hub id
  weights = "random"                                   # "pretrained" starts from its weights
  options = { widths = [16, 32, 64], blocks = [1, 1, 1] }   # keys of its config.json, where weights are random
  [pretrain]
  local = { learning_rate = 0.1, momentum = 0.9, weight_decay = 1e-4, batch_size = 128, epochs = 300 }
  milestones = [150, 225]                              # learning rate x 0.1 after these epochs

for text: data.path = "wiki.txt", model.name = "nano-gpt2", and a vocabulary made from the text:
  [pretrain]
  vocabulary_size = 8000
  vocabulary = "bpe"                                   # or "words"

The folder holds config.json, model.safetensors, the image processor or tokenizer, the names of the classes, and
pretrain.json, which says how it was made. Data of other classes get a new head.
""",
    "resume": """examples:
  fedfm resume runs/mine                               after a kill, a full disk or Ctrl-C: from the last round
  fedfm resume runs/mine --format json | tail -1       of a finished run: its result again
  fedfm resume runs/mine --rounds 40                   continue to 40 rounds, also with a finished run
  fedfm resume runs/mine --set run.folder=/mnt/stick   the folder, a SuperLink or the rows are elsewhere now
  fedfm resume runs/mine --accept-loss                 continue without files that are damaged or missing

Secrets, memories and checkpoints have checksums, and a list names the files that must exist. A run that lacks one is
refused with the file's name (exit 2): restore a copy. If a checkpoint is damaged, the one before it is used.
With --accept-loss a lost secret is drawn again, which releases its data a second time; a lost memory is replaced by the
one before, or by an empty one; without any checkpoint the run starts over. "lost" in the manifest and the result names
the files, and the report shows them. Lost lines of metrics.jsonl and messages.jsonl stop only a run with run.patience;
notices and the report say what is missing.
""",
    "audit": """examples:
  fedfm audit runs/mine                                every cheap attack that fits; the findings are in its report
  fedfm audit runs/mine --attack model_membership      one attack; --attack may be given several times
  fedfm audit runs/mine --attack inversion             images from features: trains a network, about a minute
  fedfm audit runs/mine --attack inversion --pictures public.npz
  fedfm audit runs/mine --attack extraction            the foundation model of a fedbaf server, from what clients see
  fedfm audit runs/mine --format json | tail -1        the findings as one JSON object
  fedfm audit runs/mine --time-limit 60                stops after a minute, and names the attacks that are not done
  fedfm audit runs/mine --dossier                      also two pages for a data protection officer, to print

attacks, and the runs that they fit; without --attack every one that fits and takes seconds:
  model_membership     rows recognised by the final model; every method whose clients have the model
  update_membership    rows recognised by the updates, or by their sums; methods with [method.local]
  label_counts         label counts of clients from a head's update; classifiers that send their head in the clear
  head_rows            features of rows from a head's update; the same
  membership, epsilon, reconstruction, single_holder, inversion       fedpft; inversion needs images
  extraction           fedbaf
  task_vector          fedbip, fedamp, fedawa
  expert_membership    fedms, fedpgp
  block_order, ciphertext_weights, encrypted_error, loss_labels, other_clients,
  server_view, substitute_model       blindfed
  canaries             noise for clients, unit = "client"
  row_canaries, row_norms     DP-SGD
  repeated_questions   a client asked twice for one thing in one round, by messages.jsonl; every run

A finding is a measurement with an interval and a verdict, "leaks", "holds" or "inconclusive", by a rule that is
printed with its numbers. The cheap attacks come first, and audit.json is written after each, so that Ctrl-C keeps what
was found. Exit code 0: the audit is done, or its time ran out, and it refutes no claim of the run. 1: a measurement
refutes a claim of the run, e.g. its epsilon, or the time ran out before the first finding. 2: the run cannot be
audited.
The audit replays the run in this process, from its experiment, its data and its private/ keys, and writes only
audit.json, report.html, dossier.html if the run has one, and the verdicts in manifest.json.
""",
    "report": """examples:
  fedfm report runs/mine                               of an unfinished run: its rounds so far
""",
    "sign": """examples:
  fedfm sign runs/mine                                 writes runs/mine/signature.json
  fedfm sign runs/mine --key officer.pem               with a key of your own; it is made if it is absent
  fedfm sign adapter                                   a folder that `fedfm export` wrote

The signature covers every file of the run but private/, which nobody else has: manifest, metrics, messages, report,
audit.json, models and checkpoints. If resume, audit or join write one of them later, sign the
run again. Give the public half, signing.pem.pub, to those who verify; keep the private one.
""",
    "verify": """examples:
  fedfm verify runs/mine --key signing.pem.pub         the signer's public key, received by another channel
  fedfm verify runs/mine                               by your own key, ~/.config/fedfm/signing.pem

Exit code 0: every file is as a known key signed it. 1: a file was changed, removed or added, the signature is not
genuine, or another key signed. 2: there is no signature. The known key is that of --key; without --key it is the one
that `fedfm sign` makes for you. No other key counts, since anyone who changes a file can sign the run again.
""",
    "compare": """examples:
  fedfm compare runs/mine runs/other                   a table here, and the page compare.html
  fedfm compare runs/demo-*/* --out demo.html
""",
    "predict": """examples:
  fedfm predict runs/mine new.csv                      for each row a class and its probability
  fedfm predict runs/mine pictures/ --format json | tail -1
  fedfm predict runs/mine new.csv --client north       if every client has its own model
  fedfm predict runs/mine new.csv --out labels.csv     to a file: .csv or .jsonl, one line per row, or .json

A model for instructions prints one line per answer; with a column of outputs also the perplexity.
""",
    "export": """examples:
  fedfm export runs/mine --to peft --out adapter       PeftModel.from_pretrained(model, "adapter")
  fedfm export runs/mine --to hf --out model           AutoModelForImageClassification.from_pretrained("model")
  fedfm export runs/mine --to torch --out weights      safetensors.torch.load_file("weights/model.safetensors")
""",
    "join": """examples:
  fedfm join runs/mine north.csv --client north         its model: the run's start weights and one local pass
  fedfm predict runs/mine file.csv --client north
  fedfm export runs/mine --client north --to peft --out adapter

FedBip compares the newcomer's task vector with those of the other clients, and weights similar ones. Methods with one
model for all start from that model. The output gives the accuracy on the newcomer's test rows of its model, of the
start weights, and of a model after the same number of local passes without the federation.
""",
    "list": """examples:
  fedfm list                                           everything
  fedfm list methods
""",
    "show": """examples:
  fedfm show fedprox                                   a method: keys to copy into [method]
  fedfm show label_shuffle                             an attack; `fedfm list attacks`
  fedfm show krum                                      an aggregation; `fedfm list aggregation`
""",
    "schema": """examples:
  fedfm schema --out fedfm.schema.json                 then begin exp.toml with: #:schema ./fedfm.schema.json
  fedfm schema silo --out silo.schema.json             of a silo's file; "pretrain": of a pretraining

Editors with a TOML plugin (taplo, Even Better TOML) then complete keys and names, show their meaning, and mark values
that are misspelt or out of bounds. `fedfm check` also checks files and rules across tables.
""",
    "check": """examples:
  fedfm check exp.toml                                 keys, files, rows, model; nothing is trained
  fedfm check exp.toml --set method.fraction=0.2 > whole.toml
  fedfm check exp.toml --format json | tail -1         {"valid": ..., "classes": ..., "trainable": ...}
""",
    "app": """examples:
  fedfm app flower --experiment exp.toml               an app runs one experiment
  flwr run flower CONNECTION --stream                  CONNECTION is a SuperLink's name in Flower's config.toml
""",
    "doctor": """examples:
  fedfm doctor                                         versions, cores, disk; what is missing
""",
}
