"""The grid of a supervised job, the ranks that are left of it, and the config keys that say so to invar.

Slots are those of lib/config/replica_plan.h: dpR.tpS is slot S + tensor · R, and the spares follow. Only survivors are
launched, in the order of their slots.
"""
import dataclasses
import re

FAILED = "parallel.nonuniform.failed"
SPARE = "parallel.spare"
# Of saying what is lost; FAILED excludes them.
OTHER_FORMS = {"parallel.nonuniform.tensor_widths": [], "parallel.nonuniform.non_active_ranks_per_dp": {},
               "parallel.nonuniform.tp_base": 0, "parallel.nonuniform.tp_spares": 0,
               "parallel.nonuniform.num_reduced_tp_dp_ranks": 1}
DEFAULTS = {"parallel.tensor": 1, "parallel.data": 0, SPARE: 0, FAILED: [], "parallel.nonuniform.min_tensor": 1,
            **OTHER_FORMS, "log.dir": "", "checkpoint.every": 0, "checkpoint.dir": ""}
NEEDED = ("parallel.tensor", "parallel.data", "log.dir")


class UserError(Exception):
    """A mistake that the user can fix; printed without a stack trace."""


def find_key(sections, key):
    for name in key.split("."):
        if not isinstance(sections, dict) or name not in sections:
            return None
        sections = sections[name]
    return sections


def parse_override(text):
    if text.startswith("["):
        return [item.strip(" \"'") for item in text.strip("[] ").split(",") if item.strip()]
    text = text.strip(" \"'")
    return int(text) if text.isdigit() else text


def read_config(path, overrides):
    """Key -> value of the keys in DEFAULTS, as the file and the overrides over it have them."""
    given = dict(argument.split("=", 1) for argument in overrides if "=" in argument)
    values = {key: parse_override(given[key]) for key in DEFAULTS if key in given}
    try:
        import yaml
    except ImportError:
        missing = [key for key in NEEDED if key not in values]
        if missing:
            raise UserError(f"without Python's yaml module {path} cannot be read here: install it (python3-yaml), or "
                            f"give {', '.join(missing)} on the command line, as key=value") from None
        return {**DEFAULTS, **values}
    try:
        with open(path, encoding="utf-8") as file:
            sections = yaml.safe_load(file)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    except yaml.YAMLError as error:
        raise UserError(f"{path}: not valid YAML: {error}") from None
    found = {key: find_key(sections, key) for key in DEFAULTS}
    return {**DEFAULTS, **{key: value for key, value in found.items() if value is not None}, **values}


@dataclasses.dataclass
class Layout:
    tensor: int
    data: int
    spare: int = 0
    min_tensor: int = 1
    failed: frozenset = frozenset()  # slots of the grid

    @classmethod
    def of(cls, config):
        counts = {}
        for name in ("tensor", "data", "spare", "nonuniform.min_tensor"):
            value = config[f"parallel.{name}"]
            counts[name] = 0 if value == "auto" else value
            if not isinstance(counts[name], int) or isinstance(value, bool):
                raise UserError(f"parallel.{name} must be an integer, not {value}")
        if counts["data"] < 1 or counts["tensor"] < 1:
            raise UserError("parallel.tensor and parallel.data must be numbers: ranks that die are slots of that grid")
        others = [key for key, default in OTHER_FORMS.items() if config[key] not in (default, "auto")]
        if others:
            raise UserError(f"{', '.join(others)}: failures are named by {FAILED} here: say what is lost by it alone")
        layout = cls(counts["tensor"], counts["data"], counts["spare"], counts["nonuniform.min_tensor"])
        return dataclasses.replace(layout, failed=frozenset(map(layout.slot_of, config[FAILED])))

    def slot_of(self, name):
        place = re.fullmatch(r"dp(\d+)\.tp(\d+)", name)
        if not place or int(place[1]) >= self.data or int(place[2]) >= self.tensor:
            raise UserError(f"{FAILED}: {name} is no slot of the grid; under supervision slots are dp0.tp0 to "
                            f"dp{self.data - 1}.tp{self.tensor - 1}")
        return int(place[1]) * self.tensor + int(place[2])

    @property
    def grid(self):
        return self.tensor * self.data

    def slots(self):
        """Of each launched rank."""
        return [slot for slot in range(self.grid + self.spare) if slot not in self.failed]

    def stands_in(self):
        """Spare slot -> the failed slot that it has taken."""
        return dict(zip(range(self.grid, self.grid + self.spare), sorted(self.failed)))

    def widths(self):
        """Live slots of each replica, spares included."""
        empty = self.failed - set(self.stands_in().values())
        return [sum(slot not in empty for slot in range(replica * self.tensor, (replica + 1) * self.tensor))
                for replica in range(self.data)]

    def training_widths(self):
        return [width for width in self.widths() if width >= max(1, self.min_tensor)]

    def idle(self):
        """Launched ranks that do not train."""
        taken = self.stands_in()
        widths = self.widths()
        places = [taken.get(slot, slot) for slot in self.slots()]
        return [rank for rank, place in enumerate(places)
                if place >= self.grid or widths[place // self.tensor] < max(1, self.min_tensor)]

    def name(self, slot):
        if slot < self.grid:
            return f"dp{slot // self.tensor}.tp{slot % self.tensor}"
        taken = self.stands_in().get(slot)
        return f"spare {slot - self.grid}" + (f" in the place of {self.name(taken)}" if taken is not None else "")

    def without(self, slots):
        """A spare that died is one spare less: those that are left take the failed slots anew."""
        spares = sum(slot >= self.grid for slot in slots)
        return dataclasses.replace(self, spare=self.spare - spares,
                                   failed=self.failed | {slot for slot in slots if slot < self.grid})

    def arguments(self, arguments):
        """Those of `invar train`, for this layout. invar refuses the keys of failures as long as there are none."""
        kept = [argument for argument in arguments
                if argument.split("=")[0] not in (FAILED, SPARE)
                and (self.failed or not argument.startswith("parallel.nonuniform."))]
        kept.append(f"{SPARE}={self.spare}")
        return kept + [f"{FAILED}=[{','.join(map(self.name, sorted(self.failed)))}]"] * bool(self.failed)

    def __str__(self):
        return f"{len(self.slots())} ranks, tensor widths {self.training_widths()}" + (
            f", {len(self.idle())} idle" if self.idle() else "")
