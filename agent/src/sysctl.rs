//! Network sysctls of a container. It shares the guest's network namespace, where libcontainer refuses to set them; so the agent
//! takes them out of the spec and sets them itself.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::error::{AgentError, Result};

const PROC_SYS: &str = "/proc/sys";

/// Network sysctls, by their names with dots.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct NetworkSysctls(Vec<(String, String)>);

impl NetworkSysctls {
    /// Takes them out of a spec.
    ///
    /// # Errors
    /// [`AgentError::Invalid`] for a name that is no path or a value that is no text.
    pub fn take(spec: &mut Value) -> Result<Self> {
        let Some(all) = spec.pointer_mut("/linux/sysctl").and_then(Value::as_object_mut) else {
            return Ok(Self::default());
        };
        let names: Vec<String> = all.keys().filter(|name| name.starts_with("net.")).cloned().collect();
        let mut taken = Vec::new();
        for name in names {
            if let Some(Value::String(value)) = all.remove(&name)
                && name.split(['.', '/']).all(|part| !part.is_empty())
            {
                taken.push((name, value));
            } else {
                return Err(AgentError::Invalid(format!(
                    "sysctl {name:?} is not a name with a text"
                )));
            }
        }
        Ok(Self(taken))
    }

    /// Sets them in the calling thread's network namespace.
    ///
    /// # Errors
    /// The first that cannot be set.
    pub fn set(&self) -> Result<()> {
        for (name, value) in &self.0 {
            let path = path(name);
            fs::write(&path, value)
                .map_err(|error| AgentError::io(format!("set sysctl {name} to {value:?}"), error))?;
        }
        Ok(())
    }
}

/// The file of a sysctl. As with runc, every dot is a slash.
fn path(name: &str) -> PathBuf {
    Path::new(PROC_SYS).join(name.replace('.', "/"))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn those_of_the_network_are_taken_and_the_others_stay() {
        let mut spec = json!({"linux": {"sysctl": {"net.ipv4.ip_forward": "1", "kernel.shm_rmid_forced": "1"}}});
        let taken = NetworkSysctls::take(&mut spec).expect("taken");
        assert_eq!(taken, NetworkSysctls(vec![("net.ipv4.ip_forward".into(), "1".into())]));
        assert_eq!(spec, json!({"linux": {"sysctl": {"kernel.shm_rmid_forced": "1"}}}));
        assert_eq!(path("net.ipv4.ip_forward"), Path::new("/proc/sys/net/ipv4/ip_forward"));
    }

    #[test]
    fn a_spec_without_any_is_left_alone() {
        for spec in [json!({}), json!({"linux": {}}), json!({"linux": {"sysctl": null}})] {
            let mut taken_from = spec.clone();
            assert_eq!(
                NetworkSysctls::take(&mut taken_from).expect("none"),
                NetworkSysctls::default()
            );
            assert_eq!(taken_from, spec);
        }
    }

    #[test]
    fn a_name_that_leads_elsewhere_is_refused() {
        for (name, value) in [
            ("net.", json!("1")),
            ("net...x", json!("1")),
            ("net.//x", json!("1")),
            ("net.x", json!(1)),
        ] {
            let mut spec = json!({"linux": {"sysctl": {name: value}}});
            assert!(
                matches!(NetworkSysctls::take(&mut spec), Err(AgentError::Invalid(_))),
                "{name}"
            );
        }
    }
}
