from .distributed import is_first_process as is_first_process
from .run import FitResult as FitResult
from .run import fit as fit
