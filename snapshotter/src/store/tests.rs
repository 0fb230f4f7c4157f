use std::collections::BTreeMap;
use std::fs;

use proptest::prelude::*;
use proptest::sample::Index;

use super::*;

const WRITABLE: u64 = 64 << 20;

fn open(root: &Path) -> Store {
    Store::open(root, WRITABLE).unwrap()
}

fn labels(pairs: &[(&str, &str)]) -> Labels {
    pairs.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect()
}

/// A committed snapshot with one file.
fn layer(store: &Store, name: &str, parent: &str) -> PathBuf {
    let key = format!("extract {name}");
    store.prepare(Kind::Active, &key, parent, Labels::new()).unwrap();
    let dir = dir_of(store, &key);
    fs::write(dir.join("fs/file"), name).unwrap();
    assert_eq!(store.commit(name, &key, Labels::new()).unwrap().dir, dir);
    dir
}

fn dir_of(store: &Store, name: &str) -> PathBuf {
    store.dirs.of(store.metadata.get(name).unwrap().unwrap().id)
}

fn checkpoint_layer(store: &Store, name: &str, parent: &str) -> PathBuf {
    let key = format!("checkpoint {name}");
    store.prepare(Kind::Active, &key, parent, Labels::new()).unwrap();
    let dir = dir_of(store, &key);
    fs::create_dir(dir.join("checkpoint")).unwrap();
    fs::write(dir.join("checkpoint/manifest.json"), "{}").unwrap();
    assert_eq!(
        store.commit(name, &key, Labels::new()).unwrap().derived,
        Derived::Nothing
    );
    dir
}

#[test]
fn a_container_on_an_image_gets_a_description() {
    let root = tempfile::tempdir().unwrap();
    let store = open(root.path());
    let one = layer(&store, "one", "");
    let two = layer(&store, "two", "one");
    let mounts = store.prepare(Kind::Active, "c", "two", Labels::new()).unwrap();
    assert_eq!(store.mounts("c").unwrap(), mounts);
    let source = Path::new(&mounts[0].source);
    let description = RootfsDescription::read(source).unwrap();
    assert_eq!(description.layers, [one.clone(), two.clone()]);
    assert_eq!(description.checkpoints, Vec::<PathBuf>::new());
    assert_eq!(description.writable_bytes, WRITABLE);
    assert!(source.starts_with(&description.root));
    let lower = format!("lowerdir={}:{}", two.join("fs").display(), one.join("fs").display());
    assert_eq!(mounts[0].options.last(), Some(&lower));
    // Views and snapshots on nothing are not for our shim.
    store.prepare(Kind::View, "v", "two", Labels::new()).unwrap();
    assert!(RootfsDescription::read(&dir_of(&store, "v")).unwrap_err().is_absent());
}

#[test]
fn checkpoints_are_told_from_layers() {
    let root = tempfile::tempdir().unwrap();
    let store = open(root.path());
    let base = layer(&store, "base", "");
    let first = checkpoint_layer(&store, "first", "base");
    // The second one comes from an image: its files are in the layer.
    store.prepare(Kind::Active, "x", "first", Labels::new()).unwrap();
    let second = dir_of(&store, "x");
    fs::create_dir(second.join("fs/.ramet")).unwrap();
    fs::write(second.join("fs/.ramet/manifest.json"), "{}").unwrap();
    assert_eq!(
        store.commit("second", "x", Labels::new()).unwrap().derived,
        Derived::UnpackedCheckpoint
    );

    let mounts = store.prepare(Kind::Active, "fork", "second", Labels::new()).unwrap();
    let description = RootfsDescription::read(Path::new(&mounts[0].source)).unwrap();
    assert_eq!(description.layers, std::slice::from_ref(&base));
    assert_eq!(description.checkpoints, [first, second]);
    assert_eq!(
        mounts[0].options.last(),
        Some(&format!("lowerdir={}", base.join("fs").display()))
    );
    let view = store.prepare(Kind::View, "v", "second", Labels::new()).unwrap();
    assert_eq!(view[0].options.last().unwrap().matches("snapshots").count(), 3);
}

#[test]
fn a_link_in_an_image_is_no_checkpoint() {
    let root = tempfile::tempdir().unwrap();
    let store = open(root.path());
    let elsewhere = root.path().join("elsewhere");
    fs::create_dir(&elsewhere).unwrap();
    fs::write(elsewhere.join("manifest.json"), "{}").unwrap();
    store.prepare(Kind::Active, "x", "", Labels::new()).unwrap();
    std::os::unix::fs::symlink(&elsewhere, dir_of(&store, "x").join("fs/.ramet")).unwrap();
    assert_eq!(
        store.commit("y", "x", Labels::new()).unwrap().derived,
        Derived::LayerImage
    );
}

#[test]
fn modes_come_from_the_parent() {
    use std::os::unix::fs::{MetadataExt, PermissionsExt};
    let root = tempfile::tempdir().unwrap();
    let store = open(root.path());
    store.prepare(Kind::Active, "x", "", Labels::new()).unwrap();
    let files = dir_of(&store, "x").join("fs");
    assert_eq!(fs::metadata(&files).unwrap().mode() & 0o7777, 0o755);
    fs::set_permissions(&files, fs::Permissions::from_mode(0o1751)).unwrap();
    store.commit("one", "x", Labels::new()).unwrap();
    store.prepare(Kind::Active, "c", "one", Labels::new()).unwrap();
    assert_eq!(
        fs::metadata(dir_of(&store, "c").join("fs")).unwrap().mode() & 0o7777,
        0o1751
    );
}

#[test]
fn labels_are_replaced_whole_or_one_by_one() {
    let root = tempfile::tempdir().unwrap();
    let store = open(root.path());
    store
        .prepare(Kind::Active, "x", "", labels(&[("a", "1"), ("b.c", "2")]))
        .unwrap();
    let before = store.stat("x").unwrap();
    let paths = |paths: &[&str]| paths.iter().map(ToString::to_string).collect::<Vec<_>>();
    let info = store
        .update(
            "x",
            labels(&[("a", "9"), ("z", "9")]),
            &paths(&["labels.a", "labels.b.c"]),
        )
        .unwrap();
    assert_eq!(info.labels, labels(&[("a", "9")]));
    assert!(info.updated > before.updated && info.created == before.created);
    let info = store.update("x", labels(&[("z", "3"), ("empty", "")]), &[]).unwrap();
    assert_eq!(info.labels, labels(&[("z", "3")]));
    let error = store.update("x", Labels::new(), &paths(&["parent"])).unwrap_err();
    assert!(matches!(error, StoreError::Invalid { .. }));
    assert_eq!(store.stat("x").unwrap(), info);
}

#[test]
fn usage_is_of_the_snapshot_alone() {
    let root = tempfile::tempdir().unwrap();
    let store = open(root.path());
    store.prepare(Kind::Active, "x", "", Labels::new()).unwrap();
    let empty = store.usage("x").unwrap();
    fs::write(dir_of(&store, "x").join("fs/big"), vec![1; 1 << 20]).unwrap();
    let full = store.usage("x").unwrap();
    assert_eq!(full.inodes, empty.inodes + 1);
    assert!(full.bytes >= empty.bytes + (1 << 20));
    store.commit("one", "x", Labels::new()).unwrap();
    assert_eq!(store.usage("one").unwrap(), full);
    store.prepare(Kind::Active, "c", "one", Labels::new()).unwrap();
    assert_eq!(store.usage("c").unwrap(), empty);
    let checkpoint = checkpoint_layer(&store, "cp", "one");
    fs::write(checkpoint.join("checkpoint/memory"), vec![1; 1 << 20]).unwrap();
    assert!(store.usage("cp").unwrap().bytes > 1 << 20);
}

#[test]
fn what_a_crash_leaves_is_thrown_away_at_the_next_start() {
    let root = tempfile::tempdir().unwrap();
    let store = open(root.path());
    let one = layer(&store, "one", "");
    store.prepare(Kind::Active, "lost", "one", Labels::new()).unwrap();
    let lost = dir_of(&store, "lost");
    drop(store);
    fs::create_dir_all(root.path().join("snapshots/new-77/fs")).unwrap();
    fs::create_dir_all(root.path().join("snapshots/78/fs")).unwrap();
    fs::remove_dir_all(lost).unwrap();
    let store = open(root.path());
    let left: Vec<_> = fs::read_dir(root.path().join("snapshots"))
        .unwrap()
        .map(|e| e.unwrap().path())
        .collect();
    assert_eq!(left, [one]);
    assert!(matches!(store.stat("lost"), Err(StoreError::NotFound { .. })));
    store.empty_trash();
    assert_eq!(fs::read_dir(root.path().join("trash")).unwrap().count(), 0);
    let waiting: Vec<_> = store
        .unfinished()
        .unwrap()
        .into_iter()
        .map(|c| (c.name, c.derived))
        .collect();
    assert_eq!(waiting, [("one".to_owned(), Derived::LayerImage)]);
}

#[test]
fn a_second_snapshotter_is_kept_out() {
    let root = tempfile::tempdir().unwrap();
    let store = open(root.path());
    assert!(matches!(
        Store::open(root.path(), WRITABLE),
        Err(StoreError::Metadata(_))
    ));
    drop(store);
    open(root.path());
}

#[test]
fn a_failed_prepare_changes_nothing() {
    let root = tempfile::tempdir().unwrap();
    let store = open(root.path());
    layer(&store, "one", "");
    fs::remove_dir_all(dir_of(&store, "one").join("fs")).unwrap();
    assert!(matches!(
        store.prepare(Kind::Active, "c", "one", Labels::new()),
        Err(StoreError::Io { .. })
    ));
    assert!(matches!(store.stat("c"), Err(StoreError::NotFound { .. })));
    assert_eq!(fs::read_dir(root.path().join("snapshots")).unwrap().count(), 1);
    store.prepare(Kind::Active, "c", "", Labels::new()).unwrap();
}

/// What a snapshotter is, without directories.
#[derive(Debug, Default)]
struct Model(BTreeMap<String, (Kind, String, Labels)>);

#[derive(Clone, Debug)]
enum Op {
    Prepare { view: bool, key: Index, parent: Index },
    Commit { name: Index, key: Index },
    Remove(Index),
    Update(Index, Option<String>),
    Mounts(Index),
    Restart,
}

const NAMES: [&str; 7] = ["", "a", "b", "b/c", "default/1/sha256:x", "default/1/sha256:x2", "é"];

fn name(index: &Index) -> &'static str {
    NAMES[index.index(NAMES.len())]
}

/// The outcome of a call, as far as the model tells.
#[derive(Debug, PartialEq, Eq)]
enum Outcome {
    Done,
    NotFound,
    Exists,
    Precondition,
    Invalid,
}

fn outcome<T>(result: Result<T, StoreError>) -> Outcome {
    match result {
        Ok(_) => Outcome::Done,
        Err(StoreError::NotFound { .. }) => Outcome::NotFound,
        Err(StoreError::Exists { .. }) => Outcome::Exists,
        Err(StoreError::ParentNotCommitted { .. } | StoreError::Invalid { .. }) => Outcome::Invalid,
        Err(StoreError::NotActive { .. } | StoreError::NotMountable { .. } | StoreError::HasChildren { .. }) => {
            Outcome::Precondition
        }
        Err(other) => panic!("{other:?}"),
    }
}

impl Model {
    fn prepare(&mut self, kind: Kind, key: &str, parent: &str) -> Outcome {
        if key.is_empty() {
            return Outcome::Invalid;
        }
        if self.0.contains_key(key) {
            return Outcome::Exists;
        }
        match self.0.get(parent) {
            None if !parent.is_empty() => return Outcome::NotFound,
            Some((kind, ..)) if *kind != Kind::Committed => return Outcome::Invalid,
            _ => {}
        }
        self.0
            .insert(key.to_owned(), (kind, parent.to_owned(), labels(&[("made", key)])));
        Outcome::Done
    }

    fn commit(&mut self, name: &str, key: &str) -> Outcome {
        if name.is_empty() {
            return Outcome::Invalid;
        }
        let Some((kind, parent, _)) = self.0.get(key).cloned() else {
            return Outcome::NotFound;
        };
        if self.0.contains_key(name) {
            return Outcome::Exists;
        }
        if kind != Kind::Active {
            return Outcome::Precondition;
        }
        self.0.remove(key);
        self.0.insert(
            name.to_owned(),
            (Kind::Committed, parent, labels(&[("committed", name)])),
        );
        Outcome::Done
    }

    fn remove(&mut self, name: &str) -> Outcome {
        if !self.0.contains_key(name) {
            return Outcome::NotFound;
        }
        if self.0.values().any(|(_, parent, _)| parent == name) {
            return Outcome::Precondition;
        }
        self.0.remove(name);
        Outcome::Done
    }

    fn update(&mut self, name: &str, label: Option<&str>) -> Outcome {
        let Some((_, _, labels)) = self.0.get_mut(name) else {
            return Outcome::NotFound;
        };
        labels.remove("l");
        labels.extend(label.map(|value| ("l".to_owned(), value.to_owned())));
        Outcome::Done
    }

    fn mounts(&self, name: &str) -> Outcome {
        match self.0.get(name) {
            None => Outcome::NotFound,
            Some((Kind::Committed, ..)) => Outcome::Precondition,
            Some(_) => Outcome::Done,
        }
    }
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let index = any::<Index>;
    let op = prop_oneof![
        5 => (any::<bool>(), index(), index()).prop_map(|(view, key, parent)| Op::Prepare { view, key, parent }),
        5 => (index(), index()).prop_map(|(name, key)| Op::Commit { name, key }),
        3 => index().prop_map(Op::Remove),
        2 => (index(), proptest::option::of("[a-z]{1,3}")).prop_map(|(n, label)| Op::Update(n, label)),
        2 => index().prop_map(Op::Mounts),
        1 => Just(Op::Restart),
    ];
    proptest::collection::vec(op, 0..40)
}

fn check_agreement(store: &Store, model: &Model) -> Result<(), TestCaseError> {
    let listed: Vec<_> = store
        .list()
        .unwrap()
        .into_iter()
        .map(|info| (info.name, (info.kind, info.parent.unwrap_or_default(), info.labels)))
        .collect();
    prop_assert_eq!(listed, model.0.clone().into_iter().collect::<Vec<_>>());
    let directories = fs::read_dir(store.dirs.root().join("snapshots")).unwrap().count();
    prop_assert_eq!(directories, model.0.len());
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn the_store_does_what_the_model_does(ops in ops()) {
        let root = tempfile::tempdir().unwrap();
        let mut store = open(root.path());
        let mut model = Model::default();
        for op in ops {
            match &op {
                Op::Prepare { view, key, parent } => {
                    let kind = if *view { Kind::View } else { Kind::Active };
                    let (key, parent) = (name(key), name(parent));
                    let done = store.prepare(kind, key, parent, labels(&[("made", key)]));
                    prop_assert_eq!(outcome(done), model.prepare(kind, key, parent), "{:?}", op);
                }
                Op::Commit { name: to, key } => {
                    let (to, key) = (name(to), name(key));
                    let done = store.commit(to, key, labels(&[("committed", to)]));
                    prop_assert_eq!(outcome(done), model.commit(to, key), "{:?}", op);
                }
                Op::Remove(n) => prop_assert_eq!(outcome(store.remove(name(n))), model.remove(name(n)), "{:?}", op),
                Op::Update(n, label) => {
                    let new: Labels = label.iter().map(|value| ("l".to_owned(), value.clone())).collect();
                    let done = store.update(name(n), new, &["labels.l".to_owned()]);
                    prop_assert_eq!(outcome(done), model.update(name(n), label.as_deref()), "{:?}", op);
                }
                Op::Mounts(n) => prop_assert_eq!(outcome(store.mounts(name(n))), model.mounts(name(n)), "{:?}", op),
                Op::Restart => {
                    drop(store);
                    store = open(root.path());
                }
            }
            check_agreement(&store, &model)?;
        }
        drop(store);
        check_agreement(&open(root.path()), &model)?;
    }
}
