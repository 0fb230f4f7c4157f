//! The sandbox among fakes: what containerd sees, and what is left after failures.

use std::path::Path;
use std::time::Duration;

use protocol::containerd::api::CreateTaskRequest;
use protocol::containerd::protobuf::well_known_types::any::Any;
use protocol::containerd::ttrpc::Code;

use crate::fake::{Stage, names};
use crate::lifecycle::LOST;
use crate::sandbox::Status;
use crate::stdio::StdioPaths;
use crate::vm::Vm;

const ARGS: &str = r#"["worker"]"#;

fn exec_spec() -> Option<Any> {
    let mut any = Any::new();
    any.value = br#"{"args":["x"],"cwd":"/","user":{"uid":0,"gid":0}}"#.to_vec();
    Some(any)
}

/// A container `c` that runs, with an exec `e` that was added.
async fn with_exec() -> Stage {
    let stage = Stage::new().await;
    let sandbox = &stage.sandbox;
    sandbox.create(stage.request("c", ARGS, &[])).await.unwrap();
    sandbox.start("c", None).await.unwrap();
    sandbox
        .exec("c", "e", exec_spec(), StdioPaths::default())
        .await
        .unwrap();
    stage
}

/// A request for a container with hooks.
fn with_hooks(stage: &Stage, hooks: &str) -> CreateTaskRequest {
    let request = stage.request("c", ARGS, &[]);
    let path = Path::new(&request.bundle).join("config.json");
    let spec = std::fs::read_to_string(&path).unwrap();
    std::fs::write(&path, spec.replacen('{', &format!(r#"{{"hooks":{hooks},"#), 1)).unwrap();
    request
}

#[tokio::test]
async fn a_task_lives_and_ends_as_containerd_expects() {
    let stage = Stage::new().await;
    let sandbox = &stage.sandbox;
    assert_eq!(sandbox.create(stage.request("c", ARGS, &[])).await.unwrap(), 4242);
    assert_eq!(sandbox.state("c", &None).unwrap().status, Status::CREATED);
    sandbox.start("c", None).await.unwrap();
    assert_eq!(sandbox.state("c", &None).unwrap().status, Status::RUNNING);
    assert_eq!(sandbox.pids("c").unwrap(), vec![(4242, None)]);
    assert!(
        sandbox.delete("c", None).await.is_err(),
        "a running task is not deleted"
    );
    stage.world.exit("c", "", 7);
    assert_eq!(sandbox.wait("c", &None).await.unwrap().status, 7);
    assert_eq!(sandbox.wait("c", &None).await.unwrap().status, 7, "again, at once");
    let finished = sandbox.kill("c", &None, 15, false).await.unwrap_err();
    assert_eq!(
        (finished.code(), finished.text()),
        (Code::NOT_FOUND, "process already finished".into())
    );
    let (pid, exit) = sandbox.delete("c", None).await.unwrap();
    assert_eq!((pid, exit.status), (4242, 7));
    assert_eq!(sandbox.delete("c", None).await.unwrap_err().code(), Code::NOT_FOUND);
    assert_eq!(stage.topics().await, ["create", "start", "exit", "delete"]);
    assert_eq!(stage.output("c"), "Stdout\n");
    assert_eq!(stage.world.count("release"), 1);
}

#[tokio::test]
async fn the_death_of_the_machine_ends_every_process_init_last() {
    let stage = with_exec().await;
    let sandbox = &stage.sandbox;
    let again = sandbox
        .exec("c", "e", exec_spec(), StdioPaths::default())
        .await
        .unwrap_err();
    assert_eq!(again.code(), Code::ALREADY_EXISTS);
    sandbox.start("c", Some("e".into())).await.unwrap();
    stage.vm.kill().await;
    assert_eq!(sandbox.wait("c", &Some("e".into())).await.unwrap().status, LOST);
    assert_eq!(sandbox.wait("c", &None).await.unwrap().status, LOST);
    assert_eq!(sandbox.delete("c", None).await.unwrap().1.status, LOST);
    assert_eq!(
        stage.topics().await,
        [
            "create",
            "start",
            "exec-added",
            "exec-started",
            "exit",
            "exit",
            "delete"
        ]
    );
}

#[tokio::test]
async fn a_machine_that_dies_while_a_poststart_hook_runs_ends_the_task() {
    let stage = Stage::new().await;
    let dir = stage.dir.path().display();
    let script = format!("touch {dir}/begun; until test -e {dir}/go; do sleep 0.01; done");
    let hooks = format!(r#"{{"poststart":[{{"path":"/bin/sh","args":["sh","-c","{script}"]}}]}}"#);
    stage.sandbox.create(with_hooks(&stage, &hooks)).await.unwrap();
    let sandbox = stage.sandbox.clone();
    let started = tokio::spawn(async move { sandbox.start("c", None).await });
    while !stage.dir.path().join("begun").exists() {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    stage.vm.kill().await;
    // Those who watch the machine and the process see its end.
    for _ in 0..100 {
        tokio::task::yield_now().await;
    }
    std::fs::write(stage.dir.path().join("go"), "").unwrap();
    started.await.unwrap().unwrap();
    let ended = tokio::time::timeout(Duration::from_secs(5), stage.sandbox.wait("c", &None)).await;
    assert_eq!(ended.unwrap().unwrap().status, LOST);
    assert_eq!(stage.sandbox.delete("c", None).await.unwrap().1.status, LOST);
    assert_eq!(stage.topics().await, ["create", "start", "exit", "delete"]);
}

#[tokio::test]
async fn a_poststart_hook_that_fails_ends_the_container_with_its_words() {
    let stage = Stage::new().await;
    let mark = stage.dir.path().join("stopped");
    let hooks = format!(
        r#"{{"poststart":[{{"path":"/bin/sh","args":["sh","-c","echo sorry >&2; exit 4"]}}],
            "poststop":[{{"path":"/bin/touch","args":["touch","{}"]}}]}}"#,
        mark.display()
    );
    stage.sandbox.create(with_hooks(&stage, &hooks)).await.unwrap();
    let text = stage.sandbox.start("c", None).await.unwrap_err().text();
    assert!(
        text.contains("poststart hook #0: exit status 4") && text.contains("sorry"),
        "{text}"
    );
    assert_eq!((stage.world.count("kill"), mark.exists()), (1, false));
    assert_eq!(stage.sandbox.wait("c", &None).await.unwrap().status, 255);
    assert_eq!(stage.sandbox.delete("c", None).await.unwrap().1.status, 255);
    assert!(mark.exists(), "the poststop hook has run");
}

#[tokio::test]
async fn a_task_that_is_deleted_before_it_started_has_ended_first() {
    let stage = Stage::new().await;
    stage.sandbox.create(stage.request("c", ARGS, &[])).await.unwrap();
    assert_eq!(stage.sandbox.delete("c", None).await.unwrap().1.status, LOST);
    assert_eq!(stage.topics().await, ["create", "exit", "delete"]);
}

#[tokio::test]
async fn a_failed_create_leaves_no_machine_and_lets_the_shim_end() {
    let stage = Stage::new().await;
    let words = r#"exec: "nosuch": executable file not found in $PATH"#;
    stage.world.refuse.lock().unwrap().insert("create".into(), words.into());
    let error = stage.sandbox.create(stage.request("c", ARGS, &[])).await.unwrap_err();
    assert_eq!(
        (error.code(), error.text()),
        (Code::UNKNOWN, format!("OCI runtime create failed: {words}"))
    );
    assert_eq!(stage.world.count("killed"), 1);
    assert_eq!(stage.sandbox.state("c", &None).unwrap_err().code(), Code::NOT_FOUND);
    stage.sandbox.shut_down(false);
    tokio::time::timeout(Duration::from_secs(5), stage.sandbox.shutdown.notified())
        .await
        .unwrap();
    assert_eq!(stage.topics().await, Vec::<String>::new());
}

#[tokio::test]
async fn a_failed_start_of_an_exec_leaves_the_container_running() {
    let stage = with_exec().await;
    let sandbox = &stage.sandbox;
    stage.world.refuse.lock().unwrap().insert("start".into(), "no".into());
    assert!(sandbox.start("c", Some("e".into())).await.is_err());
    sandbox.delete("c", Some("e".into())).await.unwrap();
    assert_eq!(sandbox.state("c", &None).unwrap().status, Status::RUNNING);
    assert_eq!(
        sandbox.state("c", &Some("e".into())).unwrap_err().code(),
        Code::NOT_FOUND
    );
}

#[tokio::test]
async fn a_checkpoint_that_fails_leaves_nothing_and_the_parent_runs_on() {
    let stage = Stage::new().await;
    let sandbox = &stage.sandbox;
    sandbox.create(stage.request("c", ARGS, &[])).await.unwrap();
    sandbox.start("c", None).await.unwrap();
    let target = stage.dir.path().join("target");
    for (failing, round) in [("quiesce", 1), ("save", 2), ("finish", 3)] {
        stage
            .world
            .refuse
            .lock()
            .unwrap()
            .insert(failing.into(), "no space left on device".into());
        let error = sandbox
            .checkpoint("c", Path::new("/unused"), Some(&target), false)
            .await
            .unwrap_err();
        assert!(error.text().contains("no space left"), "{}", error.text());
        assert!(!target.exists());
        assert_eq!(stage.world.count("thaw"), round, "thawed after {failing}");
        stage.world.refuse.lock().unwrap().clear();
    }
    assert_eq!(sandbox.state("c", &None).unwrap().status, Status::RUNNING);
    sandbox
        .checkpoint("c", Path::new("/unused"), Some(&target), false)
        .await
        .unwrap();
    assert!(names(&target).contains(&"manifest.json".to_owned()));
}

/// A parent that was checkpointed; returns the snapshot directory with the checkpoint.
async fn parent(stage: &Stage) -> std::path::PathBuf {
    stage.sandbox.create(stage.request("parent", ARGS, &[])).await.unwrap();
    stage.sandbox.start("parent", None).await.unwrap();
    let snapshot = stage.checkpoint_snapshot("9");
    let directory = snapshot.join("checkpoint");
    stage
        .sandbox
        .checkpoint("parent", Path::new("/unused"), Some(&directory), false)
        .await
        .unwrap();
    snapshot
}

/// Another sandbox over the same files.
async fn fork_stage(parent: Stage) -> Stage {
    let mut stage = Stage::new().await;
    stage.own = Some(std::mem::replace(&mut stage.dir, parent.dir));
    stage
}

#[tokio::test]
async fn a_fork_is_renewed_before_it_is_thawed() {
    let first = Stage::new().await;
    let snapshot = parent(&first).await;
    let stage = fork_stage(first).await;
    stage
        .sandbox
        .create(stage.request("fork", ARGS, &[snapshot]))
        .await
        .unwrap();
    stage.sandbox.start("fork", None).await.unwrap();
    let calls = stage.world.calls.lock().unwrap().clone();
    let place = |name: &str| {
        calls
            .iter()
            .position(|c| c == name)
            .unwrap_or_else(|| panic!("no {name} in {calls:?}"))
    };
    assert!(place("restore") < place("resume") && place("resume") < place("renew") && place("renew") < place("thaw"));
    assert_eq!(
        stage.world.count("create"),
        0,
        "the processes go on, nothing is created"
    );
    stage.world.exit("parent", "", 3);
    assert_eq!(
        stage.sandbox.wait("fork", &None).await.unwrap().status,
        3,
        "the guest's id is the parent's"
    );
    assert_eq!(stage.topics().await, ["create", "start", "exit"]);
}

#[tokio::test]
async fn other_args_run_beside_the_restored_processes() {
    let first = Stage::new().await;
    let snapshot = parent(&first).await;
    let stage = fork_stage(first).await;
    stage
        .sandbox
        .create(stage.request("fork", r#"["sh"]"#, &[snapshot]))
        .await
        .unwrap();
    assert_eq!((stage.world.count("exec"), stage.world.count("thaw")), (1, 0));
    stage.sandbox.start("fork", None).await.unwrap();
    assert_eq!((stage.world.count("start"), stage.world.count("thaw")), (1, 1));
}

#[tokio::test]
async fn a_fork_that_cannot_be_renewed_is_killed() {
    let first = Stage::new().await;
    let snapshot = parent(&first).await;
    let stage = fork_stage(first).await;
    stage
        .world
        .refuse
        .lock()
        .unwrap()
        .insert("renew".into(), "no entropy".into());
    let error = stage
        .sandbox
        .create(stage.request("fork", ARGS, &[snapshot]))
        .await
        .unwrap_err();
    assert!(error.text().contains("no entropy"));
    assert_eq!((stage.world.count("thaw"), stage.world.count("killed")), (0, 1));
}

#[tokio::test]
async fn a_damaged_checkpoint_is_refused_before_anything_starts() {
    let first = Stage::new().await;
    let snapshot = parent(&first).await;
    std::fs::write(snapshot.join("checkpoint/memory"), b"short").unwrap();
    let stage = fork_stage(first).await;
    let error = stage
        .sandbox
        .create(stage.request("fork", ARGS, &[snapshot]))
        .await
        .unwrap_err();
    assert!(error.text().contains("memory"), "{}", error.text());
    assert_eq!(stage.world.count("restore"), 0);
}
