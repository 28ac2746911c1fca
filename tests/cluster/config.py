"""The cluster as a value, and Slurm's configuration files as pure functions of it."""

from __future__ import annotations

import ipaddress
import os
from dataclasses import dataclass
from pathlib import Path

from .install import SEARCH_PATH

# Outside the range that the kernel gives to outgoing connections, and not Slurm's own 6817 to 6819.
CONTROLLER_PORT, NODE_PORT, DBD_PORT = 26817, 26818, 26819
#: Those of srun where a firewall needs to know them.
SRUN_PORTS = "61001-62000"
CLUSTER, ACCOUNT = "clusterddp", "ddp"
USER = os.environ.get("CLUSTERDDP_TEST_USER", "ddpuser")
RELEASES = ("trixie", "sid")


@dataclass(frozen=True)
class ClusterConfig:
    """The configuration of a cluster."""

    nodes: int = 2
    """Nodes n1 to nN, each in a network namespace."""
    gpus: int = 2
    """Fake GPUs per node; 0 for none."""
    cpus: int = 8
    """CPUs per node, as Slurm counts them, whatever the machine has."""
    threads: int = 1
    """CPUs per core."""
    reserved_cores: int = 0
    """CoreSpecCount: cores of each node that no job gets."""
    reserved_mib: int = 0
    """MemSpecLimit: memory of each node that no job gets."""
    grace: int = 20
    """GraceTime of the partition `low`, in seconds."""
    proctrack: str | None = None
    """`cgroup` or `linuxproc`; None is cgroup where cgroup v1 is mounted, else linuxproc."""
    memory_limits: bool = False
    """A job's memory (`--mem`) is allocated, and its steps' is limited to that; needs cgroup v1."""
    user_signal: bool = False
    """A preempted job gets the signal of its `--signal` instead of TERM when the grace begins."""
    expedite: bool = False
    """Jobs may be submitted with ``--requeue=expedite``; needs Slurm 25.11 or newer."""
    qos: bool = False
    """Preemption goes by QOS, `high` over `low`, instead of by partition; jobs in `low` then name it with -q."""
    slurmdbd: bool = True
    """Accounting, so that sacct answers."""
    slurmd_timeout: int = 10
    """Seconds without an answer after which a node is down."""
    kill_wait: int = 10
    """Seconds from TERM to KILL."""
    cred_expire: int = 6
    """A requeued job is held for this many seconds plus one."""
    max_array_size: int = 1001
    """The largest job array has so many tasks."""
    loopback_names: bool = False
    """Slurm knows the nodes by name, and each resolves its own to 127.0.1.1, as Debian and cloud-init configure it."""
    domain: str = ""
    """Part of the names of the nodes: n1.DOMAIN."""
    rules: bool = False
    """A plugin of the site chooses the partition by a feature, `train`. It refuses others' choice, options for GPUs and
    memory, and sbatch on nodes."""
    rank_network: bool = False
    """The nodes have a second network, ib0. On the first one, only Slurm may connect to a node."""
    conf_elsewhere: bool = False
    """Slurm's commands on the user's PATH know where slurm.conf is, and no variable tells others."""
    private_home: bool = False
    """The nodes do not have the user's home directory."""
    release: str | None = None
    """The Debian release whose Slurm it is, such as `trixie`; None is the machine's own Slurm."""

    def __post_init__(self) -> None:
        if not 1 <= self.nodes <= 64:
            raise ValueError(f"nodes is {self.nodes}; expected 1 to 64")
        if not 0 <= self.gpus <= 16:
            raise ValueError(f"gpus is {self.gpus}; expected 0 to 16 per node")
        if self.proctrack not in (None, "cgroup", "linuxproc"):
            raise ValueError(f"proctrack is {self.proctrack!r}; expected cgroup or linuxproc")
        if self.memory_limits and self.proctrack == "linuxproc":
            raise ValueError("memory_limits needs cgroups, and proctrack is linuxproc")
        if self.qos and not self.slurmdbd:
            raise ValueError("qos needs slurmdbd, which knows what a QOS is")
        if self.release not in (None, *RELEASES):
            raise ValueError(f"release is {self.release!r}; expected {' or '.join(RELEASES)}")

    @property
    def node_names(self) -> list[str]:
        return [f"n{index}{f'.{self.domain}' if self.domain else ''}" for index in range(1, self.nodes + 1)]


@dataclass(frozen=True)
class Site:
    """What depends on the machine: decided at `up`, then fixed."""

    root: Path
    """The state folder."""
    version: tuple[int, int, int]
    """Slurm's."""
    host: str
    """This machine's short host name: slurmctld starts under no other."""
    subnet: str
    """Like 10.213.77.0/24: the bridge has .1, the nodes .11 and up."""
    proctrack: str
    programs: str = ""
    """The folder of Slurm's programs, where they are not on the machine's own path."""
    plugins: str = ""
    """The folder of their plugins, where it is not the compiled-in one."""

    @property
    def search_path(self) -> str:
        return f"{self.programs}:{SEARCH_PATH}" if self.programs else SEARCH_PATH

    @property
    def bridge_address(self) -> str:
        return str(ipaddress.ip_network(self.subnet)[1])

    def address(self, node: str) -> str:
        return str(ipaddress.ip_network(self.subnet)[10 + int(short(node)[1:])])

    @property
    def rank_subnet(self) -> str:
        """The network of ib0, the upper half: of it, the nodes have .139 and up."""
        return str(list(ipaddress.ip_network(self.subnet).subnets())[1])

    def rank_address(self, node: str) -> str:
        return str(ipaddress.ip_network(self.rank_subnet)[10 + int(short(node)[1:])])


def short(node: str) -> str:
    """A node's name without the domain."""
    return node.partition(".")[0]


def slurm_conf(config: ClusterConfig, site: Site) -> str:
    """slurm.conf: reacts in seconds, limits memory if asked to, keeps every file and socket below the state folder."""
    root = site.root
    lines = [
        f"ClusterName={CLUSTER}",
        f"SlurmctldHost={site.host}({site.bridge_address})",
        f"SlurmctldPort={CONTROLLER_PORT}",
        f"SlurmdPort={NODE_PORT}",
        "SlurmUser=root",
        "SlurmdUser=root",
        *_plugins(site),
        "AuthType=auth/munge",
        "CredType=cred/munge",
        f"AuthInfo=socket={root}/run/munge.sock,cred_expire={config.cred_expire}",
        f"StateSaveLocation={root}/spool/slurmctld",
        f"SlurmdSpoolDir={root}/spool/%n",
        f"SlurmctldPidFile={root}/run/slurmctld.pid",
        f"SlurmdPidFile={root}/run/slurmd-%n.pid",
        f"SlurmctldLogFile={root}/log/slurmctld.log",
        f"SlurmdLogFile={root}/log/slurmd-%n.log",
        "SlurmctldDebug=verbose",
        "SlurmdDebug=verbose",
        f"ProctrackType=proctrack/{site.proctrack}",
        f"TaskPlugin=task/{'cgroup' if config.memory_limits else 'none'}",
        "SwitchType=switch/none",
        "MpiDefault=none",
        "MailProg=/bin/true",
        "ReturnToService=2",
        "SelectType=select/cons_tres",
        f"SelectTypeParameters=CR_{'Core' if config.threads > 1 else 'CPU'}{'_Memory' if config.memory_limits else ''}",
        "PriorityType=priority/basic",
        "SchedulerType=sched/backfill",
        "SchedulerParameters=sched_interval=1,sched_min_interval=0,bf_interval=1",
        f"PreemptType=preempt/{'qos' if config.qos else 'partition_prio'}",
        "PreemptMode=REQUEUE",
        *_user_signal(config, site),
        *(["SlurmctldParameters=enable_expedited_requeue"] if config.expedite else []),
        "JobRequeue=1",
        f"KillWait={config.kill_wait}",
        f"MaxArraySize={config.max_array_size}",
        f"SlurmdTimeout={config.slurmd_timeout}",
        "SlurmctldTimeout=10",
        "InactiveLimit=0",
        *(["JobSubmitPlugins=lua"] if config.rules else []),
        *([f"SrunPortRange={SRUN_PORTS}"] if config.rank_network else []),
        *_accounting(config, site),
        *(["GresTypes=gpu"] if config.gpus else []),
        # The nodes are as large as this file says, not as the machine is.
        "SlurmdParameters=config_overrides",
        *(_node(config, site, name) for name in config.node_names),
        *_partitions(config),
    ]
    return "\n".join(lines) + "\n"


def _plugins(site: Site) -> list[str]:
    return [f"PluginDir={site.plugins}"] if site.plugins else []


def _user_signal(config: ClusterConfig, site: Site) -> list[str]:
    if not config.user_signal:
        return []
    if site.version >= (23, 2, 0):
        return ["PreemptParameters=send_user_signal"]
    return ["SlurmctldParameters=preempt_send_user_signal"]  # 22.05 refuses the newer name


def _accounting(config: ClusterConfig, site: Site) -> list[str]:
    gather = ["JobAcctGatherType=jobacct_gather/none"]
    if not config.slurmdbd:
        return [*gather, "AccountingStorageType=accounting_storage/none"]
    return [
        *gather,
        "AccountingStorageType=accounting_storage/slurmdbd",
        f"AccountingStorageHost={site.bridge_address}",
        f"AccountingStoragePort={DBD_PORT}",
        f"AccountingStoragePass={site.root}/run/munge.sock",
        # As production clusters have it: a wrong account is refused at once.
        "AccountingStorageEnforce=associations",
        "AccountingStoreFlags=job_comment",
    ]


def _node(config: ClusterConfig, site: Site, name: str) -> str:
    more = f" Gres=gpu:{config.gpus}" if config.gpus else ""
    more += f" CoreSpecCount={config.reserved_cores}" if config.reserved_cores else ""
    more += f" MemSpecLimit={config.reserved_mib}" if config.reserved_mib else ""
    return (
        f"NodeName={name} NodeAddr={name if config.loopback_names else site.address(name)} CPUs={config.cpus} "
        f"Sockets=1 CoresPerSocket={config.cpus // config.threads} ThreadsPerCore={config.threads} "
        f"RealMemory=1000000{more}{' Features=train' if config.rules else ''} "
        "State=UNKNOWN"
    )


def _partitions(config: ClusterConfig) -> list[str]:
    common = f"Nodes={','.join(config.node_names)} MaxTime=INFINITE DefaultTime=30 OverSubscribe=NO State=UP"
    default = "NO" if config.rules else "YES"
    return [
        f"PartitionName=low {common} Default={default} PriorityTier=1 PreemptMode=REQUEUE GraceTime={config.grace}",
        f"PartitionName=high {common} PriorityTier=10 PreemptMode=REQUEUE",
        f"PartitionName=cancel {common} PriorityTier=1 PreemptMode=CANCEL GraceTime={config.grace}",
        f"PartitionName=off {common} PriorityTier=1 PreemptMode=OFF",
    ]


def job_submit_lua() -> str:
    """The plugin of ``rules``: it sees all that a user requests, also in a job that is then refused."""
    return """\
local function refused(why)
   slurm.log_user(why)
   return slurm.ERROR
end

function slurm_job_submit(job, partitions, uid)
   if uid == 0 or job.partition == "high" then return slurm.SUCCESS end
   if string.find(job.alloc_node or "", "^n%d") then return refused("submit jobs on a login node") end
   if job.partition ~= nil then return refused("do not name a partition, it follows from -C train") end
   if job.features == nil then return refused("name a feature with -C train") end
   for _, option in ipairs({"gres", "tres_per_job", "tres_per_node", "tres_per_socket", "tres_per_task"}) do
      -- From 24.05 on, tres_per_task also has the CPUs.
      if string.find(job[option] or "", "gpu") then return refused("jobs get whole nodes, so do not request GPUs") end
   end
   if job.pn_min_memory ~= nil and job.pn_min_memory < 1.8e19 then  -- NO_VAL64 is more, and so is not MEM_PER_CPU
      return refused("jobs get whole nodes, so do not request memory")
   end
   job.partition = "low"
   return slurm.SUCCESS
end

function slurm_job_modify(job, record, partitions, uid)
   return slurm.SUCCESS
end
"""


def gres_conf(config: ClusterConfig, site: Site) -> str:
    """gres.conf: device nodes of the state folder, so that CUDA_VISIBLE_DEVICES is set and /dev stays as it is."""
    if not config.gpus:
        return ""
    last = config.gpus - 1
    files = "nvidia0" if last == 0 else f"nvidia[0-{last}]"
    return f"AutoDetect=off\nName=gpu File={site.root}/dev/{files} Flags=nvidia_gpu_env\n"


def cgroup_conf(config: ClusterConfig, site: Site) -> str:
    """cgroup.conf: constrains memory or nothing.

    It is never `autodetect`, with which slurmd dies where there are no cgroups.
    """
    if site.proctrack == "linuxproc" and site.version >= (24, 5, 0):
        return "CgroupPlugin=disabled\n"
    limits = "ConstrainRAMSpace=yes\nConstrainSwapSpace=yes\n" if config.memory_limits else ""
    return f"CgroupPlugin=cgroup/v1\nCgroupMountpoint=/sys/fs/cgroup\n{limits}"


def slurmdbd_conf(site: Site) -> str:
    """slurmdbd.conf; Slurm wants it readable by its user alone."""
    root = site.root
    lines = [
        "AuthType=auth/munge",
        f"AuthInfo=socket={root}/run/munge.sock",
        f"DbdHost={site.host}",
        f"DbdAddr={site.bridge_address}",
        f"DbdPort={DBD_PORT}",
        "SlurmUser=root",
        f"PidFile={root}/run/slurmdbd.pid",
        f"LogFile={root}/log/slurmdbd.log",
        "DebugLevel=info",
        *_plugins(site),
        "StorageType=accounting_storage/mysql",
        "StorageHost=localhost",
        "StorageUser=root",  # by the socket's peer credentials: no password
        "StorageLoc=slurm",
    ]
    return "\n".join(lines) + "\n"


def my_cnf(site: Site) -> str:
    """MariaDB: one socket, no network, small, and careless about a crash: its data is thrown away."""
    root = site.root
    lines = [
        "[client-server]",
        f"socket={root}/run/mysql.sock",
        "[mariadbd]",
        "user=root",
        f"datadir={root}/db",
        f"tmpdir={root}/tmp",
        f"pid-file={root}/run/mariadb.pid",
        "skip-networking",
        "skip-name-resolve",
        "skip-log-bin",
        "innodb-buffer-pool-size=16M",
        "innodb-log-file-size=16M",
        "innodb-flush-log-at-trx-commit=0",
        "innodb-doublewrite=0",
        "innodb-lock-wait-timeout=900",
        "performance-schema=off",
        "key-buffer-size=1M",
    ]
    return "\n".join(lines) + "\n"


def hosts(config: ClusterConfig, site: Site) -> str:
    """The nodes' own /etc/hosts."""
    lines = ["127.0.0.1 localhost", "::1 localhost ip6-localhost", f"{site.bridge_address} {site.host}"]
    lines += [f"{site.address(name)} {' '.join(dict.fromkeys([name, short(name)]))}" for name in config.node_names]
    return "\n".join(lines) + "\n"
