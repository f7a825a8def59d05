"""Admission between tests, workers and runs on one machine, by files that a dead process cannot keep."""

from pytest_vram.leases.board import FOLDER_VARIABLE as FOLDER_VARIABLE
from pytest_vram.leases.board import Board as Board
from pytest_vram.leases.board import BoardTrouble as BoardTrouble
from pytest_vram.leases.board import shared_folder as shared_folder
from pytest_vram.leases.gate import Gate as Gate
from pytest_vram.leases.gate import Turnstiles as Turnstiles
from pytest_vram.leases.policy import MOST_PASSED as MOST_PASSED
from pytest_vram.leases.policy import Decision as Decision
from pytest_vram.leases.policy import Want as Want
from pytest_vram.leases.policy import World as World
from pytest_vram.leases.policy import compete as compete
from pytest_vram.leases.policy import decide as decide
from pytest_vram.leases.policy import deficit as deficit
from pytest_vram.leases.sheet import Lease as Lease
from pytest_vram.leases.sheet import Sheet as Sheet
from pytest_vram.leases.sheet import Waiting as Waiting
