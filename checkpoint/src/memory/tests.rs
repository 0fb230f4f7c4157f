use proptest::collection::{btree_map, vec};
use proptest::prelude::*;

use super::*;

const PAGES: u64 = 96;

fn id(digit: char) -> CheckpointId {
    CheckpointId::try_from(digit.to_string().repeat(32)).unwrap()
}

/// For each guest page, which file and page of it: what the index means, one page at a time.
fn model(index: &MemoryIndex) -> Vec<Option<(Option<CheckpointId>, u64)>> {
    let mut out = vec![None; usize::try_from(index.pages).unwrap()];
    for extent in &index.extents {
        for page in 0..extent.pages {
            let place = usize::try_from(extent.start + page).unwrap();
            let source = index.sources[extent.source as usize].checkpoint.clone();
            assert!(out[place].is_none());
            out[place] = Some((source, extent.source_page + page));
        }
    }
    out
}

/// Runs of pages that do not overlap, stored one after the other in a file.
fn runs() -> impl Strategy<Value = (Vec<Extent>, u64)> {
    btree_map(0..PAGES, 1..12_u64, 0..10).prop_map(|starts| {
        let mut extents = Vec::new();
        let (mut end, mut stored) = (0, 0);
        for (start, pages) in starts {
            let start = start.max(end);
            let pages = pages.min(PAGES.saturating_sub(start));
            if pages == 0 {
                continue;
            }
            extents.push(Extent {
                start,
                pages,
                source: 0,
                source_page: stored,
            });
            stored += pages;
            end = start + pages;
        }
        (extents, stored * PAGE_SIZE)
    })
}

fn chain() -> impl Strategy<Value = MemoryIndex> {
    vec(runs(), 1..5).prop_map(|saves| {
        let mut saves = saves.into_iter();
        let (extents, bytes) = saves.next().unwrap();
        let mut index = MemoryIndex::full(PAGES, bytes, extents).unwrap();
        for ((extents, bytes), digit) in saves.zip('a'..='f') {
            index = MemoryIndex::overlay(&index, &id(digit), bytes, &extents).unwrap();
        }
        index
    })
}

proptest! {
    #[test]
    fn overlay_agrees_with_a_page_by_page_model(base in chain(), (changed, bytes) in runs()) {
        let merged = MemoryIndex::overlay(&base, &id('9'), bytes, &changed).unwrap();
        let mut expected: Vec<_> = model(&base)
            .into_iter()
            .map(|page| page.map(|(source, at)| (Some(source.unwrap_or_else(|| id('9'))), at)))
            .collect();
        for extent in &changed {
            for page in 0..extent.pages {
                let place = usize::try_from(extent.start + page).unwrap();
                expected[place] = Some((None, extent.source_page + page));
            }
        }
        prop_assert_eq!(model(&merged), expected);
        let used: HashSet<u32> = merged.extents.iter().map(|extent| extent.source).collect();
        for place in 1..merged.sources.len() {
            prop_assert!(used.contains(&u32::try_from(place).unwrap()), "source {} is unused", place);
        }
    }

    #[test]
    fn decoding_gives_back_what_was_encoded(index in chain()) {
        let bytes = index.encode().unwrap();
        prop_assert_eq!(MemoryIndex::decode(&bytes).unwrap(), index);
    }

    #[test]
    fn decoding_changed_bytes_is_refused_or_valid(index in chain(), changes in vec((any::<prop::sample::Index>(), any::<u8>()), 1..6), cut in any::<prop::sample::Index>(), shorten: bool) {
        let mut bytes = index.encode().unwrap();
        for (place, value) in changes {
            let place = place.index(bytes.len());
            bytes[place] = value;
        }
        if shorten {
            bytes.truncate(cut.index(bytes.len()));
        }
        if let Ok(decoded) = MemoryIndex::decode(&bytes) {
            decoded.validate().unwrap();
            model(&MemoryIndex { pages: decoded.pages.min(PAGES).max(decoded.extents.last().map_or(1, Extent::end)), ..decoded });
        }
    }

    #[test]
    fn decoding_noise_never_panics(noise in vec(any::<u8>(), 0..400), header: bool) {
        let mut bytes = noise;
        if header && bytes.len() >= 12 {
            bytes[..8].copy_from_slice(MAGIC);
            bytes[8..12].copy_from_slice(&VERSION.to_le_bytes());
        }
        let _ = MemoryIndex::decode(&bytes);
    }

    #[test]
    fn bridged_runs_cover_all_and_are_few((extents, _) in runs(), most in 1..6_usize) {
        let before: Vec<_> = extents.iter().map(|extent| (extent.start, extent.pages)).collect();
        let mut after = before.clone();
        bridge_gaps(&mut after, most);
        prop_assert!(after.len() <= most.max(1));
        for pair in after.windows(2) {
            prop_assert!(pair[0].0 + pair[0].1 <= pair[1].0);
        }
        for (start, pages) in before {
            prop_assert!(after.iter().any(|run| run.0 <= start && start + pages <= run.0 + run.1));
        }
    }
}

fn small() -> MemoryIndex {
    let extents = vec![
        Extent {
            start: 1,
            pages: 2,
            source: 0,
            source_page: 0,
        },
        Extent {
            start: 5,
            pages: 1,
            source: 1,
            source_page: 3,
        },
    ];
    let sources = vec![
        Source {
            checkpoint: None,
            bytes: 2 * PAGE_SIZE,
        },
        Source {
            checkpoint: Some(id('b')),
            bytes: 4 * PAGE_SIZE,
        },
    ];
    MemoryIndex {
        pages: 8,
        sources,
        extents,
    }
}

fn refused(change: impl FnOnce(&mut MemoryIndex)) -> String {
    let mut index = small();
    index.validate().unwrap();
    change(&mut index);
    index.validate().unwrap_err().to_string()
}

#[test]
fn each_kind_of_nonsense_is_named() {
    assert!(refused(|i| i.extents.swap(0, 1)).contains("out of order"));
    assert!(refused(|i| i.extents[1].start = 2).contains("overlaps"));
    assert!(refused(|i| i.extents[1].pages = 4).contains("beyond the end of guest memory"));
    assert!(refused(|i| i.extents[1].start = u64::MAX).contains("beyond the end of guest memory"));
    assert!(refused(|i| i.extents[1].source_page = 4).contains("beyond the end of its memory file"));
    assert!(refused(|i| i.extents[1].source_page = u64::MAX).contains("beyond the end of its memory file"));
    assert!(refused(|i| i.extents[0].pages = 0).contains("is empty"));
    assert!(refused(|i| i.extents[0].source = 2).contains("a source that there is not"));
    assert!(refused(|i| i.sources[1].bytes += 1).contains("not a multiple"));
    assert!(refused(|i| i.sources[1].checkpoint = None).contains("comes first and once"));
    assert!(refused(|i| i.sources.push(i.sources[1].clone())).contains("again"));
    assert!(refused(|i| i.pages = MAX_PAGES + 1).contains("pages, allowed are"));
    assert!(refused(|i| i.sources.clear()).contains("sources, allowed are"));
}

/// docs/checkpoint-format.md says when these bytes may change, and what must change with them.
#[test]
fn bytes_are_as_documented() {
    let expected = [
        b"RAMETMEM\x01\0\0\0\x02\0\0\0".as_slice(),
        b"\x08\0\0\0\0\0\0\0\x02\0\0\0\0\0\0\0",
        &[b"\0\x20\0\0\0\0\0\0".as_slice(), &[0; 32]].concat(),
        &[b"\0\x40\0\0\0\0\0\0".as_slice(), &[b'b'; 32]].concat(),
        b"\x01\0\0\0\0\0\0\0\x02\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0",
        b"\x05\0\0\0\0\0\0\0\x01\0\0\0\0\0\0\0\x01\0\0\0\0\0\0\0\x03\0\0\0\0\0\0\0",
    ];
    assert_eq!(small().encode().unwrap(), expected.concat());
}

#[test]
fn a_file_of_another_length_is_refused() {
    let error = small().validate_against(&[2 * PAGE_SIZE, 3 * PAGE_SIZE]).unwrap_err();
    assert_eq!(
        error.to_string(),
        "memory file of source 1 has 12288 bytes, the index says 16384"
    );
    assert!(
        small()
            .validate_against(&[2 * PAGE_SIZE])
            .unwrap_err()
            .to_string()
            .contains("1 memory files")
    );
    small().validate_against(&[2 * PAGE_SIZE, 4 * PAGE_SIZE]).unwrap();
}

#[test]
fn another_version_is_named() {
    let mut bytes = small().encode().unwrap();
    bytes[8] = 7;
    assert_eq!(
        MemoryIndex::decode(&bytes).unwrap_err().to_string(),
        "memory index has version 7, this build reads version 1"
    );
}

#[test]
fn counts_are_bounded_before_anything_is_allocated() {
    let mut bytes = small().encode().unwrap();
    bytes[24..32].copy_from_slice(&u64::MAX.to_le_bytes());
    assert!(
        MemoryIndex::decode(&bytes)
            .unwrap_err()
            .to_string()
            .contains("extents, allowed are 0 to 16384")
    );
}
