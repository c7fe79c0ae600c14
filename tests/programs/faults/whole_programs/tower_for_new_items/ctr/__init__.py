from ctr.logs import RegionLogs, write_logs
from ctr.model import ClickModel

__all__ = ["ClickModel", "RegionLogs", "write_logs"]
