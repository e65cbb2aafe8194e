"""Speech, tables, recommendation, codebooks and graphs."""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.real_models.case import Case, Entry
from benchmarks.real_models.losses import CLASSES, classes, clicks, energy, labels, squared, tokens, tokens_loss


class Connectionist(nn.Module):
    """F.ctc_loss of what a model makes of its input, whose outputs all have `length` time steps."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.length = length

    def forward(self, output: Any, targets: Tensor, lengths: Tensor) -> Tensor:
        """The loss."""
        if isinstance(output, tuple):
            output = output[0]
        log_probs = output.log_softmax(-1).transpose(0, 1)
        steps = torch.full_like(lengths, self.length)
        return F.ctc_loss(log_probs, targets, steps, lengths)


def _first(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.mean(-1), target)


def _deepspeech(n: int) -> Case:
    models = importlib.import_module("torchaudio.models")
    module = models.DeepSpeech(n_feature=8, n_hidden=16, n_class=10, dropout=0.1)
    inputs = torch.randn(n, 1, 30, 8)
    targets = (torch.randint(1, 10, (n, 5)), torch.randint(2, 6, (n,)))
    return Case(module, inputs, targets, Connectionist(30))


def _conformer(n: int) -> Case:
    models = importlib.import_module("torchaudio.models")
    module = models.Conformer(16, 4, 32, 2, 3, dropout=0.1)
    return Case(module, (torch.randn(n, 20, 16), torch.full((n,), 20)), torch.rand(n), energy)


def _conv_tasnet(n: int) -> Case:
    models = importlib.import_module("torchaudio.models")
    module = models.ConvTasNet(
        enc_kernel_size=8,
        enc_num_feats=16,
        msk_num_feats=8,
        msk_num_hidden_feats=16,
        msk_num_layers=2,
        msk_num_stacks=2,
    )
    return Case(module, torch.randn(n, 1, 400), torch.randn(n, 2, 400), squared)


def _wavernn(n: int) -> Case:
    models = importlib.import_module("torchaudio.models")
    module = models.WaveRNN(
        upsample_scales=[2, 2],
        n_classes=8,
        hop_length=4,
        n_res_block=1,
        kernel_size=5,
        n_rnn=16,
        n_fc=16,
        n_freq=8,
        n_hidden=16,
        n_output=8,
    )
    return Case(module, (torch.randn(n, 1, 24), torch.randn(n, 1, 8, 10)), torch.rand(n), energy)


def _ecapa(n: int) -> Case:
    lobes = importlib.import_module("speechbrain.lobes.models.ECAPA_TDNN")
    module = lobes.ECAPA_TDNN(
        input_size=16, channels=[16] * 5, attention_channels=8, res2net_scale=2, se_channels=8, lin_neurons=12
    )
    return Case(module, torch.randn(n, 30, 16), torch.rand(n), energy)


def _speech_transformer(n: int) -> Case:
    lobes = importlib.import_module("speechbrain.lobes.models.transformer.Transformer")
    module = lobes.TransformerEncoder(num_layers=2, nhead=4, d_ffn=32, d_model=16, dropout=0.1)
    return Case(module, {"src": torch.randn(n, 12, 16)}, torch.rand(n), energy)


def _demucs(n: int) -> Case:
    package = importlib.import_module("demucs.demucs")
    module = package.Demucs(
        sources=["a", "b"], audio_channels=1, channels=8, depth=3, lstm_layers=1, resample=False, rescale=False
    )
    return Case(module, torch.randn(n, 1, 1024), torch.randn(n, 2, 1, 1024), squared)


def _deepctr(name: str, n: int, **options: Any) -> Case:
    models = importlib.import_module("deepctr_torch.models")
    inputs = importlib.import_module("deepctr_torch.inputs")
    columns = [inputs.SparseFeat(f"c{k}", 20, 4) for k in range(3)] + [inputs.DenseFeat("price", 2)]
    module = getattr(models, name)(columns, columns, dnn_hidden_units=(16, 8), dnn_dropout=0.1, device="cpu", **options)
    batch = torch.cat([torch.randint(20, (n, 3)).float(), torch.randn(n, 2)], dim=1)
    return Case(module, batch, torch.randint(2, (n,)).float(), clicks)


def _tabnet(n: int) -> Case:
    package = importlib.import_module("pytorch_tabnet.tab_network")
    module = package.TabNet(
        12, CLASSES, n_d=8, n_a=8, n_steps=2, virtual_batch_size=128, group_attention_matrix=torch.eye(12)
    )
    return Case(module, torch.randn(n, 12), labels(n), classes)


def _tabm(n: int) -> Case:
    package = importlib.import_module("tabm")
    module = package.TabM.make(n_num_features=6, cat_cardinalities=[3, 4], d_out=CLASSES, k=4, n_blocks=2, d_block=16)
    inputs = {"x_num": torch.randn(n, 6), "x_cat": torch.randint(3, (n, 2))}
    return Case(module, inputs, labels(n), _ensemble)


def _ensemble(output: Tensor, target: Tensor) -> Tensor:
    members = output.shape[1]
    return F.cross_entropy(output.flatten(0, 1), target.repeat_interleave(members))


def _ft_transformer(n: int) -> Case:
    package = importlib.import_module("rtdl_revisiting_models")
    module = package.FTTransformer(
        n_cont_features=6,
        cat_cardinalities=[3, 4],
        d_out=CLASSES,
        n_blocks=2,
        d_block=16,
        attention_n_heads=4,
        attention_dropout=0.1,
        ffn_d_hidden_multiplier=2,
        ffn_dropout=0.1,
        residual_dropout=0.0,
    )
    return Case(module, (torch.randn(n, 6), torch.randint(3, (n, 2))), labels(n), classes)


def _codebook(name: str, n: int, **options: Any) -> Case:
    package = importlib.import_module("vector_quantize_pytorch")
    module = nn.Sequential(nn.Linear(6, 8), getattr(package, name)(dim=8, **options))
    return Case(module, torch.randn(n, 5, 6), torch.rand(n), energy)


def _temporal(n: int) -> Case:
    package = importlib.import_module("pytorch_tcn")
    module = package.TCN(num_inputs=6, num_channels=[8, 8], kernel_size=3, dropout=0.1, output_projection=CLASSES)
    return Case(module, torch.randn(n, 6, 16), labels(n), _first)


def _linformer(n: int) -> Case:
    package = importlib.import_module("linformer")
    module = package.LinformerLM(num_tokens=99, dim=32, seq_len=12, depth=2, heads=4, k=4, dropout=0.1)
    return Case(module, tokens(n, 12, 99), tokens(n, 12, 99), tokens_loss)


def _nystrom(n: int) -> Case:
    package = importlib.import_module("nystrom_attention")
    module = package.Nystromformer(dim=32, depth=2, heads=4, dim_head=8, num_landmarks=4)
    return Case(module, torch.randn(n, 16, 32), torch.rand(n), energy)


def _conformer_pytorch(n: int) -> Case:
    package = importlib.import_module("conformer")
    module = package.Conformer(dim=16, depth=2, heads=4, dim_head=4, conv_kernel_size=5, ff_dropout=0.1)
    return Case(module, torch.randn(n, 12, 16), torch.rand(n), energy)


class ByInteraction(nn.Module):
    """The loss that a recbole model computes of an interaction, which is a dict of tensors."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, interaction: dict[str, Tensor]) -> Any:
        """The loss."""
        return self.model.calculate_loss(interaction)


class Ratings:
    """What recbole's models ask of their data set: how many users and items there are, and who rated what."""

    def num(self, field: str) -> int:
        """How many values a field has."""
        return 12

    def inter_matrix(self, form: str) -> Any:
        """Users by items."""
        sparse = importlib.import_module("scipy.sparse")
        return sparse.coo_matrix(([1.0] * 24, (list(range(12)) * 2, [k * 5 % 12 for k in range(24)])), (12, 12))


RECBOLE = {
    "USER_ID_FIELD": "user",
    "ITEM_ID_FIELD": "item",
    "NEG_PREFIX": "other_",
    "LABEL_FIELD": "label",
    "LIST_SUFFIX": "_list",
    "ITEM_LIST_LENGTH_FIELD": "length",
    "MAX_ITEM_LIST_LENGTH": 6,
    "device": "cpu",
    "loss_type": "CE",
    "n_layers": 2,
    "n_heads": 2,
    "hidden_size": 8,
    "inner_size": 16,
    "embedding_size": 8,
    "num_layers": 1,
    "dropout_prob": 0.1,
    "hidden_dropout_prob": 0.1,
    "attn_dropout_prob": 0.1,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
    "initializer_range": 0.02,
    "reg_weight": 0.01,
    "require_pow": False,
    "mf_embedding_size": 8,
    "mlp_embedding_size": 8,
    "mlp_hidden_size": [16, 8],
    "mf_train": True,
    "mlp_train": True,
    "use_pretrain": False,
    "mf_pretrain_path": None,
    "mlp_pretrain_path": None,
}


def _recbole(path: str, name: str, n: int) -> Case:
    sparse = importlib.import_module("scipy.sparse")
    if not hasattr(sparse.dok_matrix, "_update"):  # LightGCN calls what scipy has since dropped
        sparse.dok_matrix._update = lambda matrix, values: matrix._dict.update(values)
    module = getattr(importlib.import_module(f"recbole.model.{path}"), name)(RECBOLE, Ratings())
    ids = torch.randint(1, 12, (3, n))
    interaction: dict[str, Tensor] = {"user": ids[0], "item": ids[1]}
    if path.startswith("sequential"):
        interaction = {"item_list": torch.randint(1, 12, (n, 6)), "length": torch.full((n,), 4), "item_id": ids[1]}
        interaction["item"] = interaction.pop("item_id")
    elif name == "NeuMF":
        interaction["label"] = torch.randint(2, (n,)).float()
    else:
        interaction["other_item"] = ids[2]
    return Case(ByInteraction(module), (interaction,))


def _graph(name: str, n: int, **options: Any) -> Case:
    package = importlib.import_module("torch_geometric.nn")
    module = getattr(package, name)(in_channels=6, hidden_channels=8, num_layers=2, out_channels=CLASSES, **options)
    nodes = 5 * n
    return Case(module, (torch.randn(nodes, 6), torch.randint(nodes, (2, 4 * nodes))), labels(nodes), classes)


def _whole_graphs(n: int) -> Case:
    package = importlib.import_module("torch_geometric.nn")
    module = package.AttentiveFP(6, 8, 1, edge_dim=3, num_layers=1, num_timesteps=1)
    nodes, edges = 5 * n, 8 * n
    graph = torch.arange(n).repeat_interleave(5)
    inputs = (torch.randn(nodes, 6), torch.randint(nodes, (2, edges)), torch.randn(edges, 3), graph)
    return Case(module, inputs, torch.randn(n, 1), squared)


def _entry(package: str, make: Any, *args: Any, shows: str = "", batched: bool = True, **options: Any) -> Entry:
    return Entry(package, partial(make, *args, **options), shows, batched)


GRAPH: dict[str, Any] = {"shows": "no batch dimension", "batched": False}

MODELS = {
    "deepspeech_ctc": _entry("torchaudio", _deepspeech, shows="ctc_loss"),
    "conformer": _entry("torchaudio", _conformer, shows="sequence first inside, lengths"),
    "conv_tasnet": _entry("torchaudio", _conv_tasnet),
    "wavernn": _entry("torchaudio", _wavernn, shows="GRU"),
    "ecapa_tdnn": _entry("speechbrain", _ecapa),
    "speechbrain_transformer": _entry("speechbrain", _speech_transformer, shows="LayerDrop"),
    "demucs": _entry("demucs", _demucs, shows="LSTM"),
    "deepctr_deepfm": _entry("deepctr-torch", _deepctr, "DeepFM", shows="floats that hold ids"),
    "deepctr_xdeepfm": _entry(
        "deepctr-torch", _deepctr, "xDeepFM", cin_layer_size=(8, 8), shows="floats that hold ids"
    ),
    "deepctr_autoint": _entry("deepctr-torch", _deepctr, "AutoInt", shows="floats that hold ids"),
    "recbole_neumf": _entry("recbole", _recbole, "general_recommender.neumf", "NeuMF", shows="a dict as input"),
    "recbole_sasrec": _entry("recbole", _recbole, "sequential_recommender.sasrec", "SASRec", shows="a dict as input"),
    "recbole_gru4rec": _entry(
        "recbole", _recbole, "sequential_recommender.gru4rec", "GRU4Rec", shows="a dict as input"
    ),
    "recbole_lightgcn": _entry(
        "recbole", _recbole, "general_recommender.lightgcn", "LightGCN", shows="sparse adjacency, a dict as input"
    ),
    "tabnet": _entry("pytorch-tabnet", _tabnet, shows="custom autograd.Function, branch on the batch size"),
    "tabm": _entry("tabm", _tabm),
    "ft_transformer": _entry("rtdl_revisiting_models", _ft_transformer),
    "lookup_free_quantizer": _entry(
        "vector-quantize-pytorch", _codebook, "FSQ", levels=[4, 4, 3], shows="straight through"
    ),
    "vector_quantizer": _entry(
        "vector-quantize-pytorch", _codebook, "VectorQuantize", codebook_size=8, shows="codes kept in buffers"
    ),
    "tcn": _entry("pytorch-tcn", _temporal, shows="weight norm, time series"),
    "linformer": _entry("linformer", _linformer),
    "nystromformer": _entry("nystrom-attention", _nystrom, shows="statistics over the batch"),
    "conformer_pytorch": _entry("conformer", _conformer_pytorch),
    "graph_gcn": _entry("torch-geometric", _graph, "GCN", **GRAPH),
    "graph_gat": _entry("torch-geometric", _graph, "GAT", **GRAPH),
    "graph_attentive": _entry("torch-geometric", _whole_graphs, **GRAPH),
}
