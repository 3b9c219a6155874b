"""The texts below the help of each command: examples to copy, and notes."""

from __future__ import annotations

EXAMPLES = {
    "demo": """examples:
  fedfm demo                                           make five runs and a table of them, in runs/demo-<time>/
  fedfm demo --out mine --seed 1
""",
    "run": """examples:
  fedfm run exp.toml                                   run an experiment; the report is in runs/<name>-<time>/
  fedfm run exp.toml --set method.rounds=5 --set run.seed=1
  fedfm run exp.toml --engine deployment               use a SuperLink and SuperNodes on loopback, with TLS and new keys
  fedfm run exp.toml --seeds 0,1,2                     run each seed, then print mean and 95 % interval
  fedfm run exp.toml --tune 0.01,0.03,0.1              first choose the learning rate on validation rows
  fedfm run exp.toml --format json | tail -1           print the result as one JSON object

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
  fedfm pretrain vit.toml --out secret                 train a model; print metrics on held-out rows after each epoch
  fedfm pretrain vit.toml --out secret                 continue after a kill; the model has the same bits
  fedfm pretrain vit.toml --out secret --set pretrain.local.epochs=5
  fedfm run exp.toml --set model.name=secret           start an experiment from this model
  fedfm run exp.toml --set method.foundation=secret    use the model as a foundation model that stays at the server

a pretraining (all rows are in one place, all parameters are trained, images are not augmented):
  [data]
  path = "tiny_imagenet.npz"
  [model]
  name = "preact-resnet"                               # or "nano-vit", "vit-b16", "nano-gpt2", a folder, a hub id
  weights = "random"                                   # "pretrained" starts from the model's own weights
  options = { widths = [16, 32, 64], blocks = [1, 1, 1] }   # keys of its config.json; only with random weights
  [pretrain]
  local = { learning_rate = 0.1, momentum = 0.9, weight_decay = 1e-4, batch_size = 128, epochs = 300 }
  milestones = [150, 225]                              # learning rate x 0.1 after these epochs

for text: data.path = "wiki.txt", model.name = "nano-gpt2", and a vocabulary made from the text:
  [pretrain]
  vocabulary_size = 8000
  vocabulary = "bpe"                                   # or "words"

The folder contains config.json, model.safetensors, the image processor or tokenizer, the names of the classes, and
pretrain.json, which records how the model was made. An experiment with other classes gets a new head.
""",
    "resume": """examples:
  fedfm resume runs/mine                               continue after the last round (after a kill, full disk or Ctrl-C)
  fedfm resume runs/mine --format json | tail -1       print the result of a finished run again
  fedfm resume runs/mine --rounds 40                   continue a run, also a finished one, to 40 rounds
  fedfm resume runs/mine --set run.folder=/mnt/stick   continue after the folder, a SuperLink or the rows have moved
  fedfm resume runs/mine --accept-loss                 continue without files that are damaged or missing

Secrets, memories (the state that clients and server keep between rounds) and checkpoints have checksums, and a list
names the files that must exist. If one is damaged or missing, resume ends with exit code 2 and names the file: restore
a copy. If only the newest checkpoint is damaged, the one before it is used.
With --accept-loss the run continues. A lost secret is drawn again, and the data that it protects are then released a
second time. A lost memory is replaced by the version before it, or by an empty memory. Without any checkpoint the run
starts over. "lost" in the manifest and the result names the files, and the report shows them. If lines of
metrics.jsonl or messages.jsonl are lost, resume refuses only a run with run.patience; notices and the report list
the lost lines.
""",
    "audit": """examples:
  fedfm audit runs/mine                                run all attacks that fit and take seconds; findings: report.html
  fedfm audit runs/mine --attack model_membership      run one attack; --attack may be given several times
  fedfm audit runs/mine --attack inversion             compute images from features; trains networks for two minutes
  fedfm audit runs/mine --attack inversion --pictures public.npz
  fedfm audit runs/mine --attack extraction            compute fedbaf's foundation model from the messages to clients
  fedfm audit runs/mine --format json | tail -1        print the findings as one JSON object
  fedfm audit runs/mine --time-limit 60                stop after a minute, and name the attacks that were not run
  fedfm audit runs/mine --dossier                      also write two pages for a data protection officer, to print

attacks, and the runs that they fit (without --attack, all that fit and take seconds are run):
  model_membership     recognises training rows by the final model; every method whose clients have the model
  update_membership    recognises training rows by the updates, or by their sums; methods with [method.local]
  text_canaries        random texts that a client trains on once; language models, also with an encoder and a decoder
  regurgitation        training rows that the final model writes from their first half; the same models
  label_counts         clients' label counts from a head's update; classifiers that send their head in the clear
  head_rows            features of rows from a head's update; classifiers that send their head in the clear
  membership, epsilon, reconstruction, single_holder, inversion       fedpft; inversion needs images
  extraction           fedbaf
  task_vector          fedbip, fedamp, fedawa
  expert_membership    fedms, fedpgp
  block_order, ciphertext_weights, encrypted_error, loss_labels, other_clients,
  server_view, substitute_model       blindfed
  canaries             noise for clients, unit = "client"
  row_canaries, row_norms     DP-SGD
  departure            runs that fedfm leave made: does the model recognise the rows of the client that left?
  repeated_questions   messages.jsonl shows that a client was asked twice for the same part of a round; every run

A finding is a measurement with an interval and a verdict: "leaks", "holds" or "inconclusive". The rule for the verdict
is printed with its numbers. Fast attacks run first, and audit.json is written after each attack, so that Ctrl-C keeps
the findings so far. Exit code 0: the audit is done, or its time ran out, and it refutes no claim of the run. 1: a
measurement refutes a claim of the run, e.g. its epsilon, or the time ran out before the first finding. 2: the run
cannot be audited.
The audit replays the run in this process, from its experiment, its data and its private/ keys, and writes only
audit.json, report.html, dossier.html if the run has one, and the verdicts in manifest.json.
""",
    "report": """examples:
  fedfm report runs/mine                               the report of an unfinished run shows its rounds so far
  fedfm report runs/mine --rows 6                      draw six test rows with their predictions (segmentation)
""",
    "sign": """examples:
  fedfm sign runs/mine                                 write runs/mine/signature.json
  fedfm sign runs/mine --key officer.pem               sign with another key, which is made if the file is absent
  fedfm sign adapter                                   sign a folder that `fedfm export` wrote

The signature covers manifest, metrics, messages, report, audit.json, models, checkpoints and all other files of the run
except private/, which stays with its owner. If resume, audit or join write one of these files later, sign the run
again. Give the public key, signing.pem.pub, to everyone who verifies the signature; keep the private key.
""",
    "verify": """examples:
  fedfm verify runs/mine --key signing.pem.pub         use the signer's public key, received by another channel
  fedfm verify runs/mine                               use your own key, ~/.config/fedfm/signing.pem

Exit code 0: the known key has signed every file as it is now. 1: a file was changed, removed or added, the signature is
not genuine, or another key signed. 2: there is no signature. The known key is the one that --key names, or else the one
that `fedfm sign` makes for you. Other keys do not count, since anyone who changes a file can sign the run again.
""",
    "compare": """examples:
  fedfm compare runs/mine runs/other                   print a table, and write the page compare.html
  fedfm compare runs/demo-*/* --out demo.html
""",
    "predict": """examples:
  fedfm predict runs/mine new.csv                      print a class and its probability for each row
  fedfm predict runs/mine pictures/ --format json | tail -1
  fedfm predict runs/mine new.csv --client north       use the client's own model, if every client has its own
  fedfm predict runs/mine new.csv --out labels.csv     write a file: .csv or .jsonl (one line per row), .json or .npz

For a model that follows instructions, the command prints one line per answer; if the file has a column of outputs, it
prints the perplexity, too.
""",
    "export": """examples:
  fedfm export runs/mine --to peft --out adapter       PeftModel.from_pretrained(model, "adapter") loads it
  fedfm export runs/mine --to hf --out model           AutoModelForImageClassification.from_pretrained("model")
  fedfm export runs/mine --to torch --out weights      safetensors.torch.load_file("weights/model.safetensors")
""",
    "join": """examples:
  fedfm join runs/mine north.csv --client north         train a model for north: start weights, then a local pass
  fedfm predict runs/mine file.csv --client north
  fedfm export runs/mine --client north --to peft --out adapter

FedBip compares the newcomer's task vector with the task vectors of the other clients, and starts from a mean over these
clients, in which similar clients have more weight. Methods with one model for all clients start from that model. The
output has three accuracies on the newcomer's test rows: of its model, of the start weights, and of a model after the
same number of local passes without the federation.
""",
    "list": """examples:
  fedfm list                                           list all kinds
  fedfm list methods
""",
    "show": """examples:
  fedfm show fedprox                                   show a method, with keys to copy into [method]
  fedfm show regression                                show a task, with its keys of [data] and [model]
  fedfm show label_shuffle                             show an attack (see `fedfm list attacks`)
  fedfm show krum                                      show an aggregation (see `fedfm list aggregation`)
""",
    "schema": """examples:
  fedfm schema --out fedfm.schema.json                 then begin exp.toml with: #:schema ./fedfm.schema.json
  fedfm schema silo --out silo.schema.json             write the schema of a silo's file

Editors with a TOML plugin (taplo, Even Better TOML) then complete keys and names, show their meaning, and mark values
that are misspelt or out of bounds. `fedfm check` also checks data files, and rules that concern several tables.
""",
    "check": """examples:
  fedfm check exp.toml                                 check keys, files, rows and model without a run
  fedfm check exp.toml --set method.fraction=0.2 > whole.toml
  fedfm check exp.toml --format json | tail -1         {"valid": ..., "classes": ..., "trainable": ...}
""",
    "app": """examples:
  fedfm app flower --experiment exp.toml               write an app that runs one experiment
  flwr run flower CONNECTION --stream                  CONNECTION is a SuperLink's name in Flower's config.toml
""",
    "completion": """examples:
  fedfm completion zsh > ~/.zfunc/_fedfm               for zsh, in a folder that `fpath` has before `compinit`
  source <(fedfm completion bash)                      for bash, as a line of ~/.bashrc

The script has all commands, arguments, and names of methods and attacks of this version: print it again after an
update. It needs shtab (extra "completion").
""",
    "doctor": """examples:
  fedfm doctor                                         check versions, cores and disk; list missing packages
""",
}
