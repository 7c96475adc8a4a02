"""Hugging Face folders as users have them: models of several modalities, weights that lie there twice, and damaged ones."""
import json
import shutil
import struct
import unittest

from invar_job import REFERENCE, SMALL, JobTest, read_safetensors_header, tamper, to_yaml

USAGE, DATA = 2, 3

# What transformers' Gemma4UnifiedForConditionalGeneration, the class of Gemma 4 12B, saves beside its text model.
UNIFIED_TOWERS = ("embed_audio.embedding_projection.weight", "embed_vision.embedding_projection.weight",
                  *(f"vision_embedder.{name}" for name in (
                      "patch_dense.bias", "patch_dense.weight", "patch_ln1.bias", "patch_ln1.weight", "patch_ln2.bias",
                      "patch_ln2.weight", "pos_embedding", "pos_norm.bias", "pos_norm.weight")))


def read_tensors(path):
    """Name -> (dtype, shape, bytes) of a safetensors file."""
    data = path.read_bytes()
    begin = 8 + struct.unpack("<Q", data[:8])[0]
    header = read_safetensors_header(path)
    header.pop("__metadata__", None)
    return {name: (entry["dtype"], entry["shape"], data[slice(*(begin + at for at in entry["data_offsets"]))])
            for name, entry in header.items()}


def write_tensors(path, tensors):
    header, end = {}, 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + len(data)]}
        end += len(data)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(data for _, _, data in tensors.values()))


class HuggingFaceFolder(JobTest):
    def copy(self, case="qwen3"):
        folder = self.folder / "model"
        folder.mkdir()
        for name in ("config.json", "model.safetensors"):
            shutil.copy(REFERENCE / case / name, folder / name)
        return folder

    def refuse(self, *texts, code=DATA, hint=True):
        """Both import and training refuse the folder."""
        run = self.write("run.yaml", to_yaml({**SMALL, "model": {"hf_path": "model", "init": "hf"}}))
        for arguments in (["import", "model", "imported"], ["train", run]):
            self.fail_with(code, *texts, arguments=arguments, hint=hint)

    def test_a_size_beyond_any_model(self):
        config = self.copy() / "config.json"
        config.write_text(json.dumps({**json.loads(config.read_text()), "max_position_embeddings": 2**40}))
        self.refuse("model/config.json: model.max_position_embeddings = 1099511627776 must be", code=USAGE)

    def test_gemma4_12b(self):
        folder = self.copy("gemma4_dense")
        text = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({
            "model_type": "gemma4_unified", "text_config": {**text, "model_type": "gemma4_unified_text"},
            "vision_config": {"model_type": "gemma4_unified_vision"},
            "audio_config": {"model_type": "gemma4_unified_audio"}}))
        tensors = {name.replace("model.", "model.language_model.", 1): tensor
                   for name, tensor in read_tensors(folder / "model.safetensors").items()}
        towers = {f"model.{name}": ("BF16", [3], bytes(6)) for name in UNIFIED_TOWERS}
        write_tensors(folder / "model.safetensors", {**towers, **tensors})
        left_out = "left out 1 tensors of audio and 10 tensors of vision\n"
        self.assertIn(left_out, self.succeed("import", "model", "imported").stdout)
        self.succeed("export", "imported", "exported")
        self.succeed("compare", "exported", REFERENCE / "gemma4_dense" / "model.safetensors", "--exact")
        run = self.write("run.yaml", to_yaml({**SMALL, "model": {"hf_path": "model", "init": "hf"}}))
        self.assertEqual(self.succeed("train", run, "train.steps=1").stdout.count(left_out), 1)
        write_tensors(folder / "model.safetensors", {**tensors, "model.vision_projector.weight": ("F32", [1], bytes(4))})
        shutil.rmtree(self.folder / "imported")
        self.refuse("model/model.safetensors: the model has no parameter 'model.vision_projector.weight'")

    def test_weights_that_are_not_finite(self):
        folder = self.copy()
        tamper(folder / "model.safetensors", "model.layers.1.mlp.up_proj.weight",
               lambda data: data[:4 * 50] + struct.pack("<f", float("nan")) + data[4 * 51:])
        self.refuse("model/model.safetensors: tensor 'model.layers.1.mlp.up_proj.weight': element [1, 2] is nan")

    def test_two_sets_of_weights(self):
        folder = self.copy()
        tensors = read_tensors(folder / "model.safetensors")
        shard = "model-00001-of-00001.safetensors"
        write_tensors(folder / shard, tensors)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(tensors, shard)}))
        self.succeed("import", "model", "equal")
        tamper(folder / shard, "model.norm.weight", lambda data: data[:-4] + struct.pack("<f", 0.5))
        self.refuse("model/model.safetensors: tensor 'model.norm.weight': has other values in model/" + shard)
        write_tensors(folder / shard, {**tensors, "model.norm.bias": ("F32", [1], bytes(4))})
        (folder / "model.safetensors.index.json").write_text(
            json.dumps({"weight_map": dict.fromkeys([*tensors, "model.norm.bias"], shard)}))
        self.refuse("model: model.safetensors and the shards of model.safetensors.index.json are two sets of weights: "
                    f"tensor 'model.norm.bias' is only in {shard}")

    def test_config_that_is_no_sound_json(self):
        folder = self.copy()
        text = (folder / "config.json").read_text()
        for damage, message in (('{"hidden_size": 48, ', "model/config.json: hidden_size is given twice"),
                                ('{"x": ' + "[" * 100_000, "model/config.json: more than 64 levels deep"),
                                ('{"x": {"y": 1e400}, ', "model/config.json:1: x.y must be a number that a double holds")):
            (folder / "config.json").write_text(damage + text[1:])
            self.refuse(message, code=USAGE)


if __name__ == "__main__":
    unittest.main()
