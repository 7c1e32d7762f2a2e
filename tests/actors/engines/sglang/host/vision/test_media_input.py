"""Images and videos in an engine's process, with SGLang imported and no engine: tensors, patches, positions, towers."""

from __future__ import annotations

import json

import pytest

from tests.rig.host_parts import HEAD, RunParts
from tests.rig.random_vision_models import random_vision_model

pytestmark = pytest.mark.engine

TENSORS = """
import pickle, tempfile, torch
from pathlib import Path
from actors.engines.host.torch_tensors import as_message, as_torch
from actors.engines.sglang.host.vision.scheduler_tensors import SchedulerTensors
from protocol.tensors import Dtype, Tensor

def raises(kind, work):
    try:
        work()
    except kind:
        return True
    return False

def are_the_same_memory():
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.uint8, torch.int64):
        made = torch.arange(24).reshape(4, 6).to(dtype)
        message = as_message(made)
        assert (message.shape, bytes(message.data)) == ((4, 6), made.numpy(force=True).tobytes() if dtype != torch.bfloat16
            else made.view(torch.int16).numpy().tobytes())
        again = as_torch(message)
        assert again.dtype is dtype and torch.equal(again, made)
        assert again.data_ptr() == made.data_ptr(), "nothing is copied"
    assert torch.equal(as_torch(as_message(made.T)), made.T), "but what is not dense"

def keep_their_memory():
    import mmap
    mapping = mmap.mmap(-1, 4096)
    mapping[:4] = bytes([1, 2, 3, 4])
    view = memoryview(mapping).toreadonly()[:4]
    made = as_torch(Tensor(Dtype.UINT8, (2, 2), view))
    view.release()  # as the end of a stream does
    assert raises(BufferError, mapping.close), "it stays mapped while a thread computes with it"
    assert made.tolist() == [[1, 2], [3, 4]]
    del made
    mapping.close()

def are_shared_and_discarded(folder):
    tensors = SchedulerTensors("sgl_shm_mm_test_", folder)
    one, two = (tensors.share(torch.full((3, 5), number, dtype=torch.bfloat16)) for number in (1.5, 2.5))
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["sgl_shm_mm_test_1", "sgl_shm_mm_test_2"]
    assert all((folder / name).stat().st_mode & 0o777 == 0o600 for name in names)
    tensors.discard((one, None, torch.zeros(1)))
    tensors.discard((one,))
    assert [path.name for path in folder.iterdir()] == ["sgl_shm_mm_test_2"]
    tensors.discard((two,))
    full = SchedulerTensors("x/", folder)  # a file that cannot be made
    made = torch.ones(2)
    assert full.share(made) is made, "it is sent as it is"

def are_what_schedulers_receive():
    tensors = SchedulerTensors(f"sgl_shm_mm_test{os.getpid()}_")
    wanted = torch.randn(7, 3).to(torch.bfloat16)
    received = pickle.loads(pickle.dumps(tensors.share(wanted)))
    assert torch.equal(received.materialize(), wanted)
    assert not list(Path("/dev/shm").glob(f"sgl_shm_mm_test{os.getpid()}_*")), "who has received one removes its name"

are_the_same_memory()
keep_their_memory()
with tempfile.TemporaryDirectory() as place:
    are_shared_and_discarded(Path(place))
are_what_schedulers_receive()
"""

INPUT = """
import threading, torch
from attrs import evolve
from pathlib import Path
from sglang.srt.layers.rotary_embedding import MRotaryEmbedding
from actors.engines.sglang.host.vision import media_input
from actors.engines.sglang.host.vision.media_input import MediaInput
from actors.engines.sglang.host.vision.scheduler_tensors import SchedulerTensors
from actors.media.layout import PixelLimits, VisionLayout
from protocol.errors import BadRequest
from protocol.messages.media import MediaForm, MediaInfo, MediaItem, Modality
from protocol.messages.engine import EngineInfo
from protocol.messages.generation import Generate, Sampling
from protocol.tensors import Dtype, Tensor
from protocol.token_ids import TokenIds

START, IMAGE, VIDEO = 0, 11, 12
MEDIA = MediaInfo(MediaForm.EMBEDDINGS, 4, Dtype.BFLOAT16, 2, IMAGE, VIDEO, START)
INFO = EngineInfo("x", "1", 100, 500, 500, 500, 4, 16, honours_seed=False, media=MEDIA)
LAYOUT = VisionLayout(14, 2, 2, PixelLimits(3136, 10**6), PixelLimits(10**5, 6 * 10**5), IMAGE, VIDEO)
PREFIX = f"sgl_shm_mm_test{os.getpid()}_"

def made(family="qwen2_5_vl", info=INFO):
    processor = SimpleNamespace(
        model_type=family, vision_start_token_id=START, vision_end_token_id=1, _tokens_per_second=2.0,
        _processor=SimpleNamespace(image_processor=None, video_processor=None),
        mm_tokens=SimpleNamespace(image_token_id=IMAGE, video_token_id=VIDEO))
    manager = SimpleNamespace(mm_processor=processor, model_config=SimpleNamespace(dtype=torch.bfloat16, hidden_size=4))
    return MediaInput(manager, info, LAYOUT, SchedulerTensors(PREFIX))

def item(modality, grid, digest, seconds=None):
    tokens = grid[0] * grid[1] * grid[2] // 4
    data = Tensor(Dtype.BFLOAT16, (tokens, 4), memoryview(bytes(8 * tokens)))
    return MediaItem(modality, digest * 64, grid, tokens, MediaForm.EMBEDDINGS, data, seconds)

ONE, TWO = item(Modality.IMAGE, (1, 4, 4), "a"), item(Modality.IMAGE, (1, 2, 6), "b")
MOVIE = item(Modality.VIDEO, (2, 4, 2), "c", 1.5)
TOKENS = [5, START, *[IMAGE] * 4, 6, START, *[VIDEO] * 4, 7, START, *[IMAGE] * 3, 8]
REQUEST = Generate("r", TokenIds.of(TOKENS), Sampling(4), media=(ONE, TWO, MOVIE))  # in their order of each modality

async def expected(family, tokens, seconds):
    return MRotaryEmbedding.get_rope_index(
        spatial_merge_size=2, image_token_id=IMAGE, video_token_id=VIDEO, vision_start_token_id=START, model_type=family,
        tokens_per_second=2.0, input_ids=torch.tensor([tokens]), image_grid_thw=torch.tensor([[1, 4, 4], [1, 2, 6]]),
        video_grid_thw=torch.tensor([[2, 4, 2]]), second_per_grid_ts=seconds)

async def has_places_identities_and_positions():
    for family, seconds in (("qwen2_5_vl", [1.5]), ("qwen2_vl", None)):
        output = await made(family).output(REQUEST)
        assert [each.offsets for each in output.mm_items] == [[(2, 5)], [(8, 11)], [(14, 16)]]
        assert [each.modality.name for each in output.mm_items] == ["IMAGE", "VIDEO", "IMAGE"]
        assert [each.identity for each in output.mm_items] == [bytes.fromhex(name * 64) for name in "acb"]
        positions, delta = await expected(family, TOKENS, seconds)
        assert torch.equal(output.mrope_positions, positions.squeeze(1)) and torch.equal(output.mrope_position_delta, delta)
        assert output.input_ids == TOKENS
        padded = output.padded_input_ids
        assert {place for place, token in enumerate(padded) if token != TOKENS[place]} == {2, 3, 4, 5, 8, 9, 10, 11, 14, 15, 16}
        other = await made(family).output(evolve(REQUEST, media=(evolve(ONE, digest="d" * 64), TWO, MOVIE)))
        assert [place for place, pair in enumerate(zip(padded, other.padded_input_ids)) if pair[0] != pair[1]] == [2, 3, 4, 5]

async def goes_on_behind_tokens_of_places():
    plain, _ = await expected("qwen2_5_vl", [*TOKENS, 9, 9, 9], [1.5])
    for said in ([IMAGE, 9, 9], [START, IMAGE, VIDEO], [9, 9, START]):
        output = await made().output(evolve(REQUEST, tokens=TokenIds.of([*TOKENS, *said]), resumed_tokens=3))
        assert output.input_ids[-3:] == output.padded_input_ids[-3:] == said
        assert torch.equal(output.mrope_positions, plain.squeeze(1)), "positions depend on the items alone"

async def refuses_what_it_cannot_know():
    for wrong in (evolve(MOVIE, seconds_per_grid=None),):
        try:
            await made().output(evolve(REQUEST, media=(ONE, TWO, wrong)))
        except BadRequest as error:
            assert str(error) == "1 videos state the time between two steps of their grids 0 times", error
        else:
            raise AssertionError("it does not raise")
        await made("qwen2_vl").output(evolve(REQUEST, media=(ONE, TWO, wrong)))
    nan = bytearray(ONE.data.data)
    nan[:2] = bytes((0xC0, 0x7F))
    try:
        await made().output(evolve(REQUEST, media=(TWO, evolve(ONE, data=evolve(ONE.data, data=memoryview(nan))), MOVIE),
            tokens=TokenIds.of([5, START, *[IMAGE] * 3, 6, START, *[VIDEO] * 4, 7, START, *[IMAGE] * 4, 8])))
    except BadRequest as error:
        assert str(error) == "not all of the 16 elements of an item's embeddings are finite numbers", error
    else:
        raise AssertionError("it does not raise")

def left():
    return [path.name for path in Path("/dev/shm").glob(PREFIX + "*")]

async def leaves_nothing_of_callers_that_left():
    inputs, go = made(), threading.Event()
    whole = MediaInput._output
    MediaInput._output = lambda self, request: (go.wait(), whole(self, request))[1]
    tasks = [asyncio.create_task(inputs.output(REQUEST)) for _ in range(5)]
    await asyncio.sleep(0.05)
    for task in tasks[:4]:
        task.cancel()
    await asyncio.sleep(0.05)
    assert all(task.cancelled() for task in tasks[:4]), "also those whose work runs"
    go.set()
    kept = await asyncio.wait_for(tasks[4], 10)
    for _ in range(1000):
        if len(left()) == 3:
            break
        await asyncio.sleep(0.01)
    assert len(left()) == 3, left()
    MediaInput._output = whole
    inputs.discard(kept)
    assert left() == []

async def makes_a_picture_of_every_form():
    for form in (MediaForm.PIXELS, MediaForm.EMBEDDINGS):
        about = made(info=evolve(INFO, media=evolve(MEDIA, form=form))).picture()
        assert about.tokens.tolist() == [START, *[IMAGE] * 4, 0] and about.media[0].form is form
    assert made(info=evolve(INFO, request_tokens_max=6)).picture() is None, "there is no room for it"

async def main():
    await has_places_identities_and_positions()
    await goes_on_behind_tokens_of_places()
    for path in Path("/dev/shm").glob(PREFIX + "*"):
        path.unlink()
    await leaves_nothing_of_callers_that_left()
    await refuses_what_it_cannot_know()
    await makes_a_picture_of_every_form()

try:
    asyncio.run(main())
finally:
    for path in Path("/dev/shm").glob(PREFIX + "*"):
        path.unlink()
"""

PATCHES = """
import io, random, torch
from attrs import evolve
from PIL import Image
from pathlib import Path
from transformers import AutoProcessor
from actors.engines.host.torch_tensors import as_torch
from actors.media.layout import smallest_item
from actors.engines.sglang.host.vision.pixels import PixelProcessor, folder_layout
from protocol.messages.media import MediaForm, MediaItem, Modality
from protocol.tensors import Dtype, Tensor

layout = folder_layout(FOLDER)
processor = AutoProcessor.from_pretrained(FOLDER)
pixels = PixelProcessor(processor.image_processor, processor.video_processor, layout, torch.float32)

def item(modality, frames, height, width):
    data = Tensor(Dtype.UINT8, (frames, height, width, 3), memoryview(random.Random(frames).randbytes(frames * height * width * 3)))
    fit = layout.fit_image(height, width) if modality is Modality.IMAGE else layout.fit_video(frames, height, width)
    return MediaItem(modality, "0" * 64, fit.grid, fit.tokens, MediaForm.PIXELS, data, 1.0)

for height, width in ((84, 112), (60, 61), (300, 50), (30, 1000)):
    picture = item(Modality.IMAGE, 1, height, width)
    shown = Image.frombytes("RGB", (width, height), bytes(picture.data.data))
    wanted = processor.image_processor(images=[shown], return_tensors="pt")
    assert torch.equal(pixels.patches(picture), wanted["pixel_values"]), (height, width)
    assert picture.grid == tuple(wanted["image_grid_thw"][0].tolist())
    assert pixels.patches(picture).shape == (4 * picture.tokens, 1176)
movie = item(Modality.VIDEO, 4, 90, 120)
assert pixels.patches(movie).shape == (4 * movie.tokens, 1176)
assert evolve(pixels, dtype=torch.bfloat16).patches(movie).dtype is torch.bfloat16
small = smallest_item(layout)
assert (small.tokens, pixels.patches(small).shape[0]) == (4, 16)
"""

TOWERS = """
import torch
from sglang.srt.models import qwen2_5_vl, qwen2_vl
from actors.engines.sglang.host.vision import towers

CLASSES = (qwen2_vl.Qwen2VLForConditionalGeneration, qwen2_5_vl.Qwen2_5_VLForConditionalGeneration)
NAMES = ["model.layers.0.mlp.weight", "model.visual.blocks.0.weight", "visual.patch_embed.weight", "lm_head.weight"]

def loaded(names):
    seen = {}
    for each in CLASSES:
        seen[each] = each.load_weights
        each.load_weights = lambda self, weights: [name for name, _ in weights]
    return seen

kept = loaded(NAMES)
towers.leave_out_towers()
assert qwen2_vl.Qwen2VisionTransformer is qwen2_5_vl.Qwen2_5_VisionTransformer is towers.Absent
for each in CLASSES:
    assert each.load_weights(None, ((name, None) for name in NAMES)) == [NAMES[0], NAMES[3]]
tower = qwen2_vl.Qwen2VisionTransformer({}, norm_eps=1, prefix="x")
assert list(tower.parameters()) == []
try:
    tower(torch.zeros(1))
except RuntimeError as error:
    assert "left out" in str(error)
else:
    raise AssertionError("it computes")

loaded(NAMES)
towers.leave_out_language()
for each in CLASSES:
    assert each.load_weights(None, ((name, None) for name in NAMES)) == NAMES[1:3]
assert qwen2_vl.Qwen2Model is qwen2_vl.ParallelLMHead is towers.Absent
assert qwen2_vl.Qwen2Model(1, 2, prefix="").embed_tokens is None, "of a model whose head shares them"

for each in CLASSES:
    each.get_image_feature = each.get_video_feature = lambda self, items: ("together", *items)
towers.encode_items_alone()
for each in CLASSES:
    assert each.get_image_feature(None, [1, 2]) == each.get_video_feature(None, [1, 2]) == [("together", 1), ("together", 2)]
"""

PARTS = {"tensors": TENSORS, "input": INPUT, "patches": PATCHES, "towers": TOWERS}


@pytest.fixture(scope="module")
def written(run_parts: RunParts) -> dict[str, str]:
    folder = f"FOLDER = {json.dumps(str(random_vision_model('qwen2_vl')))}\n"
    return run_parts({name: HEAD + folder + code for name, code in PARTS.items()})


@pytest.mark.parametrize("part", PARTS)
def test_the_parts_of_a_host_for_images(part: str, written: dict[str, str]) -> None:
    assert written[part].endswith("done\n"), written[part]
