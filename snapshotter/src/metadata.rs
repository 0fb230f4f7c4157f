//! Which snapshots there are: one redb table by name, and an index of children.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use redb::{Database, ReadableDatabase, ReadableTable, Table, TableDefinition};
use serde::{Deserialize, Serialize};

/// Kinds of snapshots, in containerd's words.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// May be written, can become committed.
    Active,
    /// May be read only.
    View,
    /// Never changes, may have children.
    Committed,
}

/// A point in time, as in protobuf.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Time {
    /// Since 1970.
    pub seconds: i64,
    /// Below a second.
    pub nanos: i32,
}

impl Time {
    pub(crate) fn now() -> Self {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Self {
            seconds: i64::try_from(since.as_secs()).unwrap_or(i64::MAX),
            nanos: i32::try_from(since.subsec_nanos()).unwrap_or_default(),
        }
    }
}

/// What a snapshot takes on disk, without its parents.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Usage {
    /// Allocated bytes.
    pub bytes: u64,
    /// Files and directories.
    pub inodes: u64,
}

/// A snapshot as containerd sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Info {
    /// Key of an active snapshot or view, name of a committed one.
    pub name: String,
    /// Name of the parent.
    pub parent: Option<String>,
    /// Its kind.
    pub kind: Kind,
    /// As they were given.
    pub labels: BTreeMap<String, String>,
    /// When it was made or committed.
    pub created: Time,
    /// When its labels changed last.
    pub updated: Time,
}

/// A row.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Record {
    /// Number of its directory; never used twice.
    pub(crate) id: u64,
    pub(crate) kind: Kind,
    pub(crate) parent: Option<String>,
    pub(crate) created: Time,
    pub(crate) updated: Time,
    pub(crate) labels: BTreeMap<String, String>,
    /// A committed snapshot that holds a checkpoint instead of files.
    #[serde(default)]
    pub(crate) is_checkpoint: bool,
    /// Of a committed snapshot, once it was counted.
    #[serde(default)]
    pub(crate) usage: Option<Usage>,
}

impl Record {
    pub(crate) fn into_info(self, name: &str) -> Info {
        Info {
            name: name.to_owned(),
            parent: self.parent,
            kind: self.kind,
            labels: self.labels,
            created: self.created,
            updated: self.updated,
        }
    }
}

/// Why the metadata cannot be read or written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MetadataError {
    /// The database refused.
    #[error("snapshot metadata")]
    Database(#[from] redb::Error),
    /// A row is no record.
    #[error("metadata of snapshot {name:?}")]
    Row {
        /// The snapshot.
        name: String,
        /// Where it is wrong.
        #[source]
        source: serde_json::Error,
    },
}

fn database(error: impl Into<redb::Error>) -> MetadataError {
    MetadataError::Database(error.into())
}

const SNAPSHOTS: TableDefinition<'_, &str, &[u8]> = TableDefinition::new("snapshots");
/// Parent and child.
const CHILDREN: TableDefinition<'_, (&str, &str), ()> = TableDefinition::new("children");
const COUNTERS: TableDefinition<'_, &str, u64> = TableDefinition::new("counters");
const LAST_ID: &str = "last id";

/// Pages kept in memory. The whole file is small.
const CACHE_BYTES: usize = 8 << 20;

/// The database; a call is one transaction.
pub(crate) struct Metadata {
    db: Database,
}

impl Metadata {
    pub(crate) fn open(path: &Path) -> Result<Self, MetadataError> {
        let db = Database::builder()
            .set_cache_size(CACHE_BYTES)
            .create(path)
            .map_err(database)?;
        let this = Self { db };
        this.write(|_| Ok::<_, MetadataError>(()))?; // makes the tables
        Ok(this)
    }

    /// Runs `change` on the tables. If it returns an error, nothing changes. A successful return is durable.
    pub(crate) fn write<T, E: From<MetadataError>>(
        &self,
        change: impl FnOnce(&mut Tables<'_>) -> Result<T, E>,
    ) -> Result<T, E> {
        let transaction = self.db.begin_write().map_err(database)?;
        let result = {
            let mut tables = Tables {
                snapshots: transaction.open_table(SNAPSHOTS).map_err(database)?,
                children: transaction.open_table(CHILDREN).map_err(database)?,
                counters: transaction.open_table(COUNTERS).map_err(database)?,
            };
            change(&mut tables)
        };
        match result {
            Ok(value) => {
                transaction.commit().map_err(database)?;
                Ok(value)
            }
            Err(e) => {
                transaction.abort().map_err(database)?;
                Err(e)
            }
        }
    }

    pub(crate) fn get(&self, name: &str) -> Result<Option<Record>, MetadataError> {
        get(&self.snapshots()?, name)
    }

    /// The record and those of its ancestors, from the snapshot down to the base; empty if there is no such snapshot.
    pub(crate) fn chain(&self, name: &str) -> Result<Vec<Record>, MetadataError> {
        chain(&self.snapshots()?, name)
    }

    /// Every snapshot, as they were at one moment.
    pub(crate) fn all(&self) -> Result<Vec<(String, Record)>, MetadataError> {
        let mut all = Vec::new();
        for row in self.snapshots()?.iter().map_err(database)? {
            let (name, bytes) = row.map_err(database)?;
            all.push((name.value().to_owned(), decode(name.value(), bytes.value())?));
        }
        Ok(all)
    }

    fn snapshots(&self) -> Result<redb::ReadOnlyTable<&'static str, &'static [u8]>, MetadataError> {
        self.db
            .begin_read()
            .map_err(database)?
            .open_table(SNAPSHOTS)
            .map_err(database)
    }
}

/// The tables within a transaction.
pub(crate) struct Tables<'t> {
    snapshots: Table<'t, &'static str, &'static [u8]>,
    children: Table<'t, (&'static str, &'static str), ()>,
    counters: Table<'t, &'static str, u64>,
}

impl Tables<'_> {
    pub(crate) fn get(&self, name: &str) -> Result<Option<Record>, MetadataError> {
        get(&self.snapshots, name)
    }

    pub(crate) fn chain(&self, name: &str) -> Result<Vec<Record>, MetadataError> {
        chain(&self.snapshots, name)
    }

    pub(crate) fn next_id(&mut self) -> Result<u64, MetadataError> {
        let next = self
            .counters
            .get(LAST_ID)
            .map_err(database)?
            .map_or(0, |last| last.value())
            + 1;
        self.counters.insert(LAST_ID, next).map_err(database)?;
        Ok(next)
    }

    /// Adds or replaces a record under a name; its parent must stay the same when it is replaced.
    pub(crate) fn put(&mut self, name: &str, record: &Record) -> Result<(), MetadataError> {
        let bytes = serde_json::to_vec(record).map_err(|source| MetadataError::Row {
            name: name.to_owned(),
            source,
        })?;
        self.snapshots.insert(name, bytes.as_slice()).map_err(database)?;
        if let Some(parent) = &record.parent {
            self.children.insert((parent.as_str(), name), ()).map_err(database)?;
        }
        Ok(())
    }

    /// Takes a record out.
    pub(crate) fn take(&mut self, name: &str, record: &Record) -> Result<(), MetadataError> {
        self.snapshots.remove(name).map_err(database)?;
        if let Some(parent) = &record.parent {
            self.children.remove((parent.as_str(), name)).map_err(database)?;
        }
        Ok(())
    }

    pub(crate) fn has_children(&self, name: &str) -> Result<bool, MetadataError> {
        let mut rows = self.children.range((name, "")..).map_err(database)?;
        match rows.next() {
            None => Ok(false),
            Some(row) => Ok(row.map_err(database)?.0.value().0 == name),
        }
    }
}

fn get(table: &impl ReadableTable<&'static str, &'static [u8]>, name: &str) -> Result<Option<Record>, MetadataError> {
    match table.get(name).map_err(database)? {
        None => Ok(None),
        Some(bytes) => decode(name, bytes.value()).map(Some),
    }
}

fn chain(table: &impl ReadableTable<&'static str, &'static [u8]>, name: &str) -> Result<Vec<Record>, MetadataError> {
    let mut chain = Vec::new();
    let mut next = Some(name.to_owned());
    while let Some(name) = next {
        // A parent was there before its child and cannot be removed before it, so this ends.
        let Some(record) = get(table, &name)? else { break };
        next = record.parent.clone();
        chain.push(record);
    }
    Ok(chain)
}

fn decode(name: &str, bytes: &[u8]) -> Result<Record, MetadataError> {
    serde_json::from_slice(bytes).map_err(|source| MetadataError::Row {
        name: name.to_owned(),
        source,
    })
}
