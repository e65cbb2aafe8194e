"""Language, speech and translation with recurrent layers: dropout between layers, sequences first, packed ones, CTC."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from benchmarks.paper_models.case import Batch, Paper, ids, normal

VOCABULARY, WIDTH, TIME, TAGS, MELS = 15, 12, 7, 4, 6


def text(n: int, generator: torch.Generator) -> Batch:
    """Tokens and those that follow, time first."""
    found = ids(generator, VOCABULARY, TIME + 1, n)
    return (found[:-1].clone(),), found[1:].clone()


class LanguageModel(nn.Module):
    """LSTM layers with dropout between them, time first."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.drop = nn.Embedding(VOCABULARY, WIDTH), nn.Dropout(0.3)
        self.lstm, self.head = nn.LSTM(WIDTH, WIDTH, 2, dropout=0.3), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.drop(self.lstm(self.drop(self.table(tokens)))[0]))


def next_token(scores: Tensor, target: Tensor) -> Tensor:
    """Mean over all tokens."""
    return F.cross_entropy(scores.view(-1, VOCABULARY), target.view(-1))


class Awd(nn.Module):
    """LSTMs whose recurrent weights are dropped, with one mask for all of a sequence, and a tied head."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(nn.LSTMCell(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.head.weight = self.table.weight

    def locked(self, x: Tensor) -> Tensor:
        """One mask for all steps of an example."""
        if not self.training:
            return x
        kept = torch.rand(1, x.size(1), x.size(2), dtype=x.dtype) < 0.7
        return x * kept / 0.7

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = self.locked(self.table(tokens))
        for layer in self.layers:
            assert isinstance(layer, nn.LSTMCell)
            weight = F.dropout(layer.weight_hh, 0.3, self.training)
            h = c = x.new_zeros(x.size(1), WIDTH)
            outputs = []
            for step in x:
                gates = F.linear(step, layer.weight_ih, layer.bias_ih) + F.linear(h, weight, layer.bias_hh)
                i, f, g, o = gates.chunk(4, 1)
                c = f.sigmoid() * c + i.sigmoid() * g.tanh()
                h = o.sigmoid() * c.tanh()
                outputs.append(h)
            raw = torch.stack(outputs)
            x = self.locked(raw)
        return self.head(x), x, raw


def awd(found: tuple[Tensor, ...], target: Tensor) -> Tensor:
    """Cross entropy, with penalties of activations and of their changes."""
    scores, dropped, raw = found
    total = F.cross_entropy(scores.reshape(-1, VOCABULARY), target.reshape(-1))
    return total + 2 * dropped.pow(2).mean() + (raw[1:] - raw[:-1]).pow(2).mean()


# -- translation -------------------------------------------------------------------------------------------------------


class Translation(nn.Module):
    """Encoder and decoder of LSTMs, time first."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.goal = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(VOCABULARY, WIDTH)
        self.encoder, self.decoder = (nn.LSTM(WIDTH, WIDTH, 2, dropout=0.2) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, source: Tensor, goal: Tensor) -> Tensor:
        state = self.encoder(self.source(source))[1]
        return self.head(self.decoder(self.goal(goal), state)[0])


def pairs(n: int, generator: torch.Generator) -> Batch:
    """Source and target sentence, time first, and what follows in the target."""
    (goal,), following = text(n, generator)
    return (ids(generator, VOCABULARY, 6, n), goal), following


class Attended(nn.Module):
    """A decoder that looks at the encoder's states at every step."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.goal = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(VOCABULARY, WIDTH)
        self.encoder = nn.GRU(WIDTH, WIDTH // 2, bidirectional=True, batch_first=True)
        self.cell = nn.GRUCell(2 * WIDTH, WIDTH)
        self.query, self.key, self.score = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.drop, self.head = nn.Dropout(0.2), nn.Linear(2 * WIDTH, VOCABULARY)

    def forward(self, source: Tensor, goal: Tensor) -> Tensor:
        states, last = self.encoder(self.source(source))
        h, keys, outputs = last.transpose(0, 1).flatten(1), self.key(states), []
        for k in range(goal.size(1)):
            weight = self.score(torch.tanh(keys + self.query(h).unsqueeze(1))).softmax(1)
            context = (weight * states).sum(1)
            h = self.cell(torch.cat([self.drop(self.goal(goal[:, k])), context], 1), h)
            outputs.append(self.head(torch.cat([h, context], 1)))
        return torch.stack(outputs, 1)


def attended(n: int, generator: torch.Generator) -> Batch:
    """Batch first; token 0 is padding."""
    goal = ids(generator, VOCABULARY, n, 6)
    return (ids(generator, VOCABULARY, n, 5), goal[:, :-1].clone()), goal[:, 1:].clone()


def ignoring(scores: Tensor, target: Tensor) -> Tensor:
    """Mean over the tokens that are no padding."""
    return F.cross_entropy(scores.transpose(1, 2), target, ignore_index=0)


class Transformer(nn.Module):
    """`nn.Transformer`, sequence first, with masks."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.goal = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(VOCABULARY, WIDTH)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # which would rather have the batch first
            self.inner = nn.Transformer(WIDTH, 2, 1, 1, 16, dropout=0.1)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, source: Tensor, goal: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(len(goal), dtype=torch.float64)
        return self.head(self.inner(self.source(source), self.goal(goal), tgt_mask=mask))


# -- tagging and classification ----------------------------------------------------------------------------------------


class Packed(nn.Module):
    """Sequences of several lengths, packed; the last state is classified."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(2 * WIDTH, TAGS)
        self.lstm = nn.LSTM(WIDTH, WIDTH, 2, dropout=0.2, bidirectional=True, batch_first=True)

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(self.table(tokens), lengths, batch_first=True, enforce_sorted=False)
        states = pad_packed_sequence(self.lstm(packed)[0], batch_first=True)[0]
        return self.head(states.max(1).values)


def padded(n: int, generator: torch.Generator) -> Batch:
    """Tokens with their number, and a class."""
    return (ids(generator, VOCABULARY, n, TIME), 2 + ids(generator, TIME - 1, n)), ids(generator, TAGS, n)


class Crf(nn.Module):
    """Tags by a bidirectional LSTM, and the likelihood of the whole sequence of them; forward is the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.drop = nn.Embedding(VOCABULARY, WIDTH), nn.Dropout(0.2)
        self.lstm = nn.LSTM(WIDTH, WIDTH // 2, bidirectional=True, batch_first=True)
        self.head, self.moves = nn.Linear(WIDTH, TAGS), nn.Parameter(torch.randn(TAGS, TAGS))

    def forward(self, tokens: Tensor, tags: Tensor) -> Tensor:
        scores = self.head(self.lstm(self.drop(self.table(tokens)))[0])
        own = scores.gather(2, tags.unsqueeze(2)).sum((1, 2)) + self.moves[tags[:, :-1], tags[:, 1:]].sum(1)
        alpha = scores[:, 0]
        for k in range(1, scores.size(1)):
            alpha = (alpha.unsqueeze(2) + self.moves).logsumexp(1) + scores[:, k]
        return (alpha.logsumexp(1) - own).mean()


def tagged(n: int, generator: torch.Generator) -> Batch:
    """Tokens with their tags."""
    return (ids(generator, VOCABULARY, n, TIME), ids(generator, TAGS, n, TIME)), None


# -- speech and writing ------------------------------------------------------------------------------------------------


class DeepSpeech(nn.Module):
    """Convolutions over the spectrum, and GRUs in both directions."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Sequential(nn.Conv2d(1, 3, 3, padding=1), nn.BatchNorm2d(3), nn.Hardtanh(0, 20))
        self.gru = nn.GRU(3 * MELS, WIDTH, 2, dropout=0.2, bidirectional=True)
        self.head = nn.Linear(2 * WIDTH, VOCABULARY)

    def forward(self, spectrum: Tensor) -> Tensor:
        x = self.conv(spectrum.unsqueeze(1)).flatten(1, 2)
        return self.head(self.gru(x.permute(2, 0, 1))[0]).log_softmax(-1).transpose(0, 1)


def ctc(scores: Tensor, target: Tensor) -> Tensor:
    """Of transcripts of four letters."""
    n, time = scores.shape[:2]
    return F.ctc_loss(scores.transpose(0, 1), target, torch.full((n,), time), torch.full((n,), 4))


def speech(n: int, generator: torch.Generator) -> Batch:
    """Spectra and transcripts."""
    return (normal(generator, n, MELS, 12),), 1 + ids(generator, VOCABULARY - 1, n, 4)


class Crnn(nn.Module):
    """Text in images: convolutions, then two bidirectional LSTMs along the width."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Sequential(
            *(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 8, 3, padding=1)),
            *(nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d((4, 1))),
        )
        self.first, self.second = (nn.LSTM(8, 4, bidirectional=True) for _ in range(2))
        self.head = nn.Linear(8, VOCABULARY)

    def forward(self, image: Tensor) -> Tensor:
        x = self.conv(image).squeeze(2).permute(2, 0, 1)
        return self.head(self.second(self.first(x)[0])[0]).log_softmax(2).permute(1, 0, 2)


def writing(n: int, generator: torch.Generator) -> Batch:
    """Lines of text as images, and their letters."""
    return (normal(generator, n, 1, 8, 24),), 1 + ids(generator, VOCABULARY - 1, n, 4)


class Tacotron(nn.Module):
    """Letters to spectra: an encoder, and a decoder that attends to it and reads what it wrote before."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, WIDTH)
        self.prenet = nn.Sequential(nn.Linear(MELS, WIDTH), nn.ReLU(), nn.Dropout(0.5))
        self.encoder = nn.GRU(WIDTH, WIDTH // 2, bidirectional=True, batch_first=True)
        self.attend, self.query = nn.GRUCell(2 * WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.decoder, self.head = nn.GRUCell(2 * WIDTH, WIDTH), nn.Linear(WIDTH, MELS)
        self.postnet = nn.Conv1d(MELS, MELS, 3, padding=1)

    def forward(self, letters: Tensor, mels: Tensor) -> dict[str, Any]:
        memory = self.encoder(self.table(letters))[0]
        frames = torch.cat([torch.zeros_like(mels[:, :1]), mels[:, :-1]], 1)
        h = d = context = memory.new_zeros(memory.size(0), WIDTH)
        outputs = []
        for k in range(frames.size(1)):
            h = self.attend(torch.cat([self.prenet(frames[:, k]), context], 1), h)
            weight = torch.einsum("ntc,nc->nt", memory, self.query(h)).softmax(1)
            context = torch.einsum("nt,ntc->nc", weight, memory)
            d = self.decoder(torch.cat([h, context], 1), d)
            outputs.append(self.head(d))
        coarse = torch.stack(outputs, 1)
        return {"coarse": coarse, "fine": coarse + self.postnet(coarse.transpose(1, 2)).transpose(1, 2)}


def of_frames(found: dict[str, Tensor], target: Tensor) -> Tensor:
    """Absolute errors of both spectra."""
    return F.l1_loss(found["coarse"], target) + F.l1_loss(found["fine"], target)


def spoken(n: int, generator: torch.Generator) -> Batch:
    """Letters and spectra."""
    mels = normal(generator, n, 4, MELS)
    return (ids(generator, VOCABULARY, n, 6), mels), mels.clone()


MODELS = {
    "lstm_lm": Paper("Zaremba, Sutskever, Vinyals, RNN Regularization, 2014", LanguageModel, text, next_token, dims=1),
    "awd_lstm": Paper("Merity, Keskar, Socher, Regularizing LSTM Language Models, 2018", Awd, text, awd, dims=1),
    "seq2seq_lstm": Paper(
        "Sutskever, Vinyals, Le, Sequence to Sequence Learning, 2014", Translation, pairs, next_token, dims=1
    ),
    "seq2seq_attention": Paper(
        "Bahdanau, Cho, Bengio, Learning to Align and Translate, 2015", Attended, attended, ignoring
    ),
    "transformer": Paper("Vaswani et al., Attention Is All You Need, 2017", Transformer, pairs, next_token, dims=1),
    "packed_lstm": Paper(
        "Graves, Mohamed, Hinton, Deep Recurrent Neural Networks, 2013", Packed, padded, F.cross_entropy
    ),
    "bilstm_crf": Paper("Huang, Xu, Yu, Bidirectional LSTM-CRF Models, 2015", Crf, tagged),
    "deep_speech_2": Paper("Amodei et al., Deep Speech 2, 2016", DeepSpeech, speech, ctc),
    "crnn": Paper("Shi, Bai, Yao, End-to-End Image-based Sequence Recognition, 2015", Crnn, writing, ctc),
    "tacotron": Paper("Wang et al., Tacotron, 2017", Tacotron, spoken, of_frames),
}
