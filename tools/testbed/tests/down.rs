//! Proof that a cluster leaves nothing behind, however it ended. A separate program, because it takes the
//! cluster down.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on says why by panicking")]

use std::{
    collections::BTreeMap,
    fs,
    path::Path,
    time::{Duration, Instant},
};

use k8s_openapi::api::batch::v1::Job;
use kube::{Api, api::PostParams};
use serde_json::json;
use testbed::{Doing, Found, KWOK_MARK, Paths, RUN, Up, Whose, images::reference};

/// The parts of the machine that a cluster changes while it is up.
fn machine() -> Vec<(&'static str, String)> {
    let run = |line: &str| {
        let words: Vec<&str> = line.split(' ').collect();
        String::from_utf8(std::process::Command::new(words[0]).args(&words[1..]).output().unwrap().stdout)
            .unwrap()
    };
    let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
    let list = |path: &str| {
        let mut names: Vec<_> =
            fs::read_dir(path).into_iter().flatten().flatten().map(|entry| entry.path()).collect();
        names.sort();
        format!("{names:?}")
    };
    vec![
        ("routes", run("ip route show table all")),
        ("interfaces", run("ip -o -br link show")),
        ("network namespaces", run("ip netns list")),
        ("firewall", run("nft list ruleset")),
        ("mounts", read("/proc/self/mounts")),
        ("resolver", read("/etc/resolv.conf")),
        ("forwarding", read("/proc/sys/net/ipv4/ip_forward")),
        ("overcommit", read("/proc/sys/vm/overcommit_memory")),
        ("panic", read("/proc/sys/kernel/panic") + &read("/proc/sys/kernel/panic_on_oops")),
        ("/run", list("/run")),
        ("/var/lib", list("/var/lib")),
        ("/var/log", list("/var/log")),
        ("cgroups", list("/sys/fs/cgroup") + &list("/sys/fs/cgroup/memory") + &list("/sys/fs/cgroup/pids")),
    ]
}

#[tokio::test]
#[ignore = "starts a cluster, which needs root: make test"]
async fn a_cluster_leaves_nothing_behind_however_it_ended() {
    let paths = Paths::find().unwrap();
    testbed::down(&paths, Whose::Ours).unwrap();
    let before = Before { machine: machine(), processes: processes(&paths) };
    assert!(testbed::down(&paths, Whose::Ours).unwrap().is_none(), "taking down nothing is fine");

    // A regular end, with fake nodes and finished pods.
    assert!(matches!(testbed::up(&paths, 1, 2).await.unwrap(), Up::Started(_)));
    assert!(matches!(testbed::up(&paths, 1, 2).await.unwrap(), Up::Already(_)));
    assert!(!testbed::leftovers(&paths).unwrap().is_empty(), "what is there is seen");
    fake_nodes_run_a_job(&paths).await;
    // Tests of another checkout neither replace the cluster nor take it down.
    let other = Paths { root: "/somewhere/else".into() };
    for refused in [testbed::up(&other, 1, 0).await.map(drop), testbed::down(&other, Whose::Ours).map(drop)] {
        assert!(refused.unwrap_err().to_string().contains("down --any"));
    }
    assert!(matches!(testbed::find(), Found::Up(_)) && testbed::dead().is_empty());
    testbed::down(&paths, Whose::Ours).unwrap();
    nothing_is_left(&paths, &before);

    // Neither a start nor `down` touches the socket of another kubelet.
    let socket = Path::new("/var/lib/kubelet/device-plugins/kubelet.sock");
    fs::create_dir_all(socket.parent().unwrap()).unwrap();
    fs::write(socket, "").unwrap();
    let refused = testbed::up(&paths, 1, 0).await;
    testbed::down(&paths, Whose::Ours).unwrap();
    fs::remove_file(socket).unwrap();
    assert!(refused.unwrap_err().to_string().contains("kubelet.sock exists"));
    testbed::down(&paths, Whose::Ours).unwrap();
    nothing_is_left(&paths, &before);

    // A crash: no pid is known, and every process keeps running.
    let started = Instant::now();
    testbed::up(&paths, 2, 0).await.unwrap();
    println!("two nodes and DNS were ready after {:.1} s", started.elapsed().as_secs_f32());
    fs::remove_dir_all(format!("{RUN}/pids")).unwrap();
    assert!(matches!(testbed::find(), Found::Stale(_)));
    testbed::down(&paths, Whose::Ours).unwrap();
    nothing_is_left(&paths, &before);

    // An interrupted start, which the next start removes by itself.
    let half = tokio::time::timeout(Duration::from_millis(500), testbed::up(&paths, 1, 0)).await;
    assert!(half.is_err(), "it is not up yet");
    assert!(matches!(testbed::find(), Found::Stale(_)));
    // Another interruption, when the first pod exists.
    tokio::select! {
        up = testbed::up(&paths, 1, 0) => panic!("it came up before its pods: {up:?}"),
        () = a_pod_is_there() => {}
    }
    assert!(matches!(testbed::find(), Found::Stale(_)));
    assert!(!processes(&paths).is_empty(), "running processes are found");
    testbed::down(&paths, Whose::Ours).unwrap();
    nothing_is_left(&paths, &before);

    // A power failure: /run is lost with the boot, and the next start also removes what is left elsewhere.
    assert!(matches!(testbed::up(&paths, 1, 0).await.unwrap(), Up::Started(_)));
    testbed::cut_power().unwrap();
    forget_run();
    assert!(matches!(testbed::find(), Found::Nothing));
    assert!(paths.pki().exists(), "the checkout keeps its folder over a reboot");
    assert!(matches!(testbed::up(&paths, 1, 0).await.unwrap(), Up::Started(_)));
    testbed::cut_power().unwrap();
    forget_run();
    testbed::down(&paths, Whose::Ours).unwrap();
    nothing_is_left(&paths, &before);
}

/// The state of the machine without a cluster.
struct Before {
    machine: Vec<(&'static str, String)>,
    processes: BTreeMap<u32, String>,
}

fn nothing_is_left(paths: &Paths, before: &Before) {
    assert_eq!(testbed::leftovers(paths).unwrap(), Vec::<String>::new());
    let mut left = processes(paths);
    left.retain(|pid, _| !before.processes.contains_key(pid));
    assert!(left.is_empty(), "{left:#?}");
    for (was, is) in before.machine.iter().zip(machine()) {
        assert_eq!(*was, is);
    }
}

/// Processes that belong to a cluster, identified without the testbed's cgroups: its programs, processes with
/// one of its paths among their arguments, and processes in one of its containers.
fn processes(paths: &Paths) -> BTreeMap<u32, String> {
    let own = fs::read_link("/proc/self/ns/mnt").unwrap();
    let marks = [paths.state().display().to_string(), RUN.to_owned()];
    let programs = ["kubernetes", "coredns", "kwok", "versitygw", "peer"];
    let programs = programs.map(|name| testbed::cache().join(format!("{name}-v")).display().to_string());
    let pids = fs::read_dir("/proc").unwrap().flatten();
    pids.filter_map(|entry| {
        let pid: u32 = entry.file_name().to_str()?.parse().ok()?;
        let read = |file: &str| {
            fs::read(entry.path().join(file)).map(|text| String::from_utf8_lossy(&text).into_owned())
        };
        let exe = fs::read_link(entry.path().join("exe")).ok()?.display().to_string();
        let cmdline = read("cmdline").ok()?.replace('\0', " ");
        let inside = fs::read_link(entry.path().join("ns/mnt")).is_ok_and(|space| space != own);
        let mounts = if inside { read("mountinfo").unwrap_or_default() } else { String::new() };
        let ours = programs.iter().any(|program| exe.starts_with(program))
            || marks.iter().any(|mark| cmdline.contains(mark) || mounts.contains(mark));
        ours.then(|| (pid, format!("{exe}: {cmdline}")))
    })
    .collect()
}

async fn a_pod_is_there() {
    let tasks = format!("{RUN}/node-1/containerd/io.containerd.runtime.v2.task/k8s.io");
    while fs::read_dir(&tasks).map_or(0, Iterator::count) == 0 {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Loses the contents of /run, as a reboot does.
fn forget_run() {
    let mounts = fs::read_to_string("/proc/self/mounts").unwrap();
    let mounted = mounts.lines().filter_map(|line| line.split(' ').nth(1));
    for mount in mounted.filter(|path| path.starts_with(RUN)).collect::<Vec<_>>().into_iter().rev() {
        assert!(std::process::Command::new("umount").args(["--lazy", mount]).status().unwrap().success());
    }
    fs::remove_dir_all(RUN).unwrap();
}

async fn fake_nodes_run_a_job(paths: &Paths) {
    let jobs: Api<Job> = Api::namespaced(testbed::client(paths).await.unwrap(), "default");
    let job = json!({"metadata": {"name": "fake"}, "spec": {"completions": 20, "parallelism": 20, "template": {"spec": {
        "restartPolicy": "Never", "nodeSelector": {KWOK_MARK: "fake"},
        "tolerations": [{"key": KWOK_MARK, "operator": "Exists"}],
        "containers": [{"name": "main", "image": reference("busybox")}]}}}});
    jobs.create(&PostParams::default(), &serde_json::from_value(job).unwrap()).await.unwrap();
    let completed = async || {
        let job = jobs.get("fake").await.doing(|| "read the state of the Job".to_owned())?;
        Ok(job.status.and_then(|status| status.completion_time))
    };
    let timeout = Duration::from_secs(300);
    testbed::eventually(paths, "twenty pods on fake nodes complete", timeout, completed).await.unwrap();
}
